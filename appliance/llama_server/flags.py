"""The flags of `appliance-llama-server`: llama-server's own names, each with the parameter that it sets.

One row a flag, so that a further one is a further row. What a row sets is a dotted path into `xllamacpp.CommonParams`;
flags that no row names are refused, because an engine that ignores a flag runs with settings nobody asked for. Nothing
here imports the wheel: a wrong flag is answered on machines that cannot load it, too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs


class WrongFlag(Exception):
    """The command line cannot be used; the text is what to print after `error: `."""


@attrs.frozen
class Flag:
    """`names` as on the command line, the parameter `path` they set, and how the value is read from its word."""

    names: tuple[str, ...]
    path: str
    read: Callable[[str], object]
    value: str
    text: str


@attrs.frozen
class Switch:
    """A flag without a value: `names` set `path` to `on`, `off_names` to its opposite."""

    names: tuple[str, ...]
    path: str
    text: str
    off_names: tuple[str, ...] = ()
    on: bool = True


@attrs.frozen
class Adapter:
    """A LoRA adapter file and the scale it has for requests that name none."""

    path: str
    scale: float


@attrs.frozen
class Settings:
    """What a command line asks for: parameter path -> value, only for what was given. `adapters` keep their order."""

    values: dict[str, object] = attrs.field(factory=dict)
    adapters: tuple[Adapter, ...] = ()
    help: bool = False
    version: bool = False

    @property
    def model(self) -> str:
        """Path of the GGUF file; "" when none was given."""
        return str(self.values.get("model.path", ""))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Addresses to listen on, or paths of Unix sockets that end in `.sock`."""
        hosts = self.values["hostnames"]
        assert isinstance(hosts, list)
        return tuple(hosts)

    @property
    def port(self) -> int:
        """TCP port, 0 for one that the kernel chooses."""
        port = self.values["port"]
        assert isinstance(port, int)
        return port


def _words(word: str) -> list[str]:
    return [part for part in word.split(",") if part]


def _one_of(**meanings: object) -> Callable[[str], object]:
    def read(word: str) -> object:
        if word not in meanings:
            raise ValueError(f"expected one of {', '.join(meanings)}")
        return meanings[word]

    return read


def _port(word: str) -> int:
    port = int(word) if word.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise ValueError("expected a port, 0 to 65535")
    return port


def _layers(word: str) -> int:
    # llama.cpp's own numbers for the two words.
    named = {"auto": -1, "all": -2}
    return named[word] if word in named else int(word)


def _lines_of(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as broken:
        raise ValueError(f"cannot read it: {broken.strerror}") from broken
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as broken:
        raise ValueError(f"cannot read it: {broken.strerror}") from broken


_FLASH = _one_of(auto=-1, off=0, on=1)
_POOLING = _one_of(none=0, mean=1, cls=2, last=3, rank=4)
_LOAD_MODE = _one_of(**{"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4})
_REASONING = _one_of(**{"none": 0, "auto": 1, "deepseek-legacy": 2, "deepseek": 3})
_CACHE_TYPE = _one_of(f32=0, f16=1, q4_0=2, q4_1=3, q5_0=6, q5_1=7, q8_0=8, iq4_nl=20, bf16=30)

ROWS: tuple[Flag | Switch, ...] = (
    Flag(("-m", "--model"), "model.path", str, "FILE", "model to load, a GGUF file"),
    Flag(("-a", "--alias"), "model_alias", _words, "NAMES", "model names that clients see, comma-separated"),
    Flag(("--host",), "hostnames", _words, "HOSTS", "addresses to listen on, or Unix sockets ending in .sock"),
    Flag(("--port",), "port", _port, "N", "port to listen on (default: 8080); 0 takes a free one and prints it"),
    Switch(("--reuse-port",), "reuse_port", "share the port with other processes"),
    Flag(("--api-key",), "api_keys", _words, "KEYS", "keys that clients must send, comma-separated"),
    Flag(("--api-key-file",), "api_keys", _lines_of, "FILE", "the same, one a line; lines with # are comments"),
    Flag(("--api-prefix",), "api_prefix", str, "PATH", "path in front of every route"),
    Flag(("--ssl-key-file",), "ssl_file_key", str, "FILE", "private key for HTTPS, PEM"),
    Flag(("--ssl-cert-file",), "ssl_file_cert", str, "FILE", "certificate for HTTPS, PEM"),
    Flag(("-to", "--timeout"), "timeout", int, "S", "seconds a read or a write may take (default: 3600)"),
    Flag(("--sse-ping-interval",), "sse_ping_interval", int, "S", "seconds between comments on quiet streams"),
    Flag(("--threads-http",), "n_threads_http", int, "N", "threads that answer HTTP"),
    Switch(("--metrics",), "endpoint_metrics", "serve /metrics"),
    Switch(("--slots",), "endpoint_slots", "serve /slots (default)", ("--no-slots",)),
    Switch(("--props",), "endpoint_props", "let POST /props change settings"),
    Switch(("--ui", "--webui"), "ui", "serve the built-in web page (default)", ("--no-ui", "--no-webui")),
    Flag(("-t", "--threads"), "cpuparams.n_threads", int, "N", "threads for generation (default: all cores)"),
    Flag(("-tb", "--threads-batch"), "cpuparams_batch.n_threads", int, "N", "threads for prompts (default: as -t)"),
    Flag(("-c", "--ctx-size"), "n_ctx", int, "N", "context tokens of all slots together; 0 takes the model's"),
    Flag(("-np", "--parallel"), "n_parallel", int, "N", "slots (default: -1, auto)"),
    Switch(("-kvu", "--kv-unified"), "kv_unified", "one KV pool for all slots", ("-no-kvu", "--no-kv-unified")),
    Flag(("--kv-unified-per-slot",), "kv_unified_per_slot", int, "N", "context tokens one slot may take of it"),
    Flag(("-n", "--predict", "--n-predict"), "n_predict", int, "N", "tokens to generate at most; -1 is no limit"),
    Flag(("-b", "--batch-size"), "n_batch", int, "N", "logical batch size"),
    Flag(("-ub", "--ubatch-size"), "n_ubatch", int, "N", "physical batch size"),
    Flag(("--keep",), "n_keep", int, "N", "tokens of the first prompt to keep when the context shifts"),
    Switch(("--context-shift",), "ctx_shift", "shift a full context", ("--no-context-shift",)),
    Switch(
        ("-cb", "--cont-batching"), "cont_batching", "batch continuously (default)", ("-nocb", "--no-cont-batching")
    ),
    Flag(("-fa", "--flash-attn"), "flash_attn_type", _FLASH, "on|off|auto", "flash attention"),
    Flag(("-ctk", "--cache-type-k"), "cache_type_k", _CACHE_TYPE, "TYPE", "type of the K cache (default: f16)"),
    Flag(("-ctv", "--cache-type-v"), "cache_type_v", _CACHE_TYPE, "TYPE", "type of the V cache (default: f16)"),
    Flag(("-ngl", "--gpu-layers", "--n-gpu-layers"), "n_gpu_layers", _layers, "N|auto|all", "layers to keep on GPUs"),
    Flag(("-mg", "--main-gpu"), "main_gpu", int, "N", "GPU for what is not split"),
    Flag(("-lm", "--load-mode"), "load_mode", _LOAD_MODE, "MODE", "auto, none, mmap, mlock, mmap+mlock or dio"),
    Switch(("--warmup",), "warmup", "run once before serving (default)", ("--no-warmup",)),
    Switch(("--cache-prompt",), "cache_prompt", "reuse a slot's prompt (default)", ("--no-cache-prompt",)),
    Flag(("--cache-reuse",), "n_cache_reuse", int, "N", "smallest chunk to reuse by shifting"),
    Flag(("-cram", "--cache-ram"), "cache_ram_mib", int, "MIB", "memory for prompts of idle slots; 0 turns it off"),
    Flag(("-sps", "--slot-prompt-similarity"), "slot_prompt_similarity", float, "X", "match a slot must have"),
    Flag(("--sleep-idle-seconds",), "sleep_idle_seconds", int, "S", "idle time after which the model is unloaded"),
    Flag(("--lora",), "lora", _words, "FILES", "LoRA adapters at scale 1, comma-separated"),
    Flag(("--lora-scaled",), "lora-scaled", _words, "FILE:X,...", "LoRA adapters, each with its scale"),
    Switch(("--embedding", "--embeddings"), "embedding", "serve embeddings only"),
    Switch(("--rerank", "--reranking"), "rerank", "serve reranking"),
    Flag(("--pooling",), "pooling_type", _POOLING, "TYPE", "none, mean, cls, last or rank"),
    Switch(("--jinja",), "use_jinja", "use the model's own chat template (default)", ("--no-jinja",)),
    Flag(("--chat-template",), "chat_template", str, "TEXT", "another chat template"),
    Flag(("--chat-template-file",), "chat_template", _text_of, "FILE", "the same, from a file"),
    Flag(("--reasoning-format",), "reasoning_format", _REASONING, "NAME", "none, auto, deepseek or deepseek-legacy"),
    Flag(("-s", "--seed"), "sampling.seed", lambda word: int(word) % 2**32, "N", "seed; -1 takes a random one"),
    Flag(("--temp", "--temperature"), "sampling.temp", float, "X", "temperature of requests that set none"),
    Flag(("--top-k",), "sampling.top_k", int, "N", "top-k of requests that set none"),
    Flag(("--top-p",), "sampling.top_p", float, "X", "top-p of requests that set none"),
    Flag(("--min-p",), "sampling.min_p", float, "X", "min-p of requests that set none"),
    Flag(("--repeat-penalty",), "sampling.penalty_repeat", float, "X", "penalty for repetition"),
    Switch(("--ignore-eos",), "sampling.ignore_eos", "never stop at the end token"),
    Flag(("-lv", "--verbosity", "--log-verbosity"), "verbosity", int, "N", "1 errors, 2 warnings, 3 info, 5 all"),
    Switch(("-v", "--verbose", "--log-verbose"), "log-all", "log everything"),
    Switch(("--log-disable",), "log-none", "log nothing"),
)

_DEFAULTS: dict[str, object] = {"hostnames": ["127.0.0.1"], "port": 8080}


def parse(words: Sequence[str]) -> Settings:
    """Settings of a command line without the program's name. Raises WrongFlag for the first thing that is wrong."""
    flags = {name: row for row in ROWS for name in row.names}
    off = {name: row for row in ROWS if isinstance(row, Switch) for name in row.off_names}
    values = dict(_DEFAULTS)
    adapters: list[Adapter] = []
    rest = iter(words)
    for name in rest:
        if name in ("-h", "--help", "--usage"):
            return Settings(values, help=True)
        if name == "--version":
            return Settings(values, version=True)
        match flags.get(name) or off.get(name):
            case Flag() as flag:
                value = _value(flag, name, next(rest, None))
                if flag.path in ("lora", "lora-scaled"):
                    adapters += _adapters(name, value, scaled=flag.path == "lora-scaled")
                else:
                    values |= _spread(flag.path, value)
            case Switch() as switch:
                values |= _spread(switch.path, switch.on if name in switch.names else not switch.on)
            case None:
                raise WrongFlag(f"invalid argument: {name} (appliance-llama-server --help lists what it takes)")
    values.setdefault("cpuparams_batch.n_threads", values.get("cpuparams.n_threads", -1))
    if not values["hostnames"]:
        raise WrongFlag("--host: expected an address")
    return Settings(values, tuple(adapters))


def usage() -> str:
    """The text of --help."""
    lines = ["usage: appliance-llama-server -m FILE [flags]", ""]
    for row in ROWS:
        names = ", ".join((*row.names, *(row.off_names if isinstance(row, Switch) else ())))
        head = f"{names} {row.value}" if isinstance(row, Flag) else names
        lines += [head, *textwrap.wrap(row.text, 100, initial_indent="        ", subsequent_indent="        ")]
    return "\n".join(lines)


def _value(flag: Flag, name: str, word: str | None) -> object:
    if word is None:
        raise WrongFlag(f"{name}: expected a value ({flag.value})")
    try:
        return flag.read(word)
    except ValueError as wrong:
        expected = str(wrong) if flag.read not in (int, float) else "expected a number"
        raise WrongFlag(f"{name} {word}: {expected}") from wrong


def _adapters(name: str, parts: object, *, scaled: bool) -> list[Adapter]:
    assert isinstance(parts, list)
    if not scaled:
        return [Adapter(part, 1.0) for part in parts]
    found = []
    for part in parts:
        path, colon, scale = part.rpartition(":")
        try:
            found.append(Adapter(path, float(scale)))
        except ValueError as wrong:
            raise WrongFlag(f"{name} {part}: expected FILE:SCALE") from wrong
        if not colon or not path:
            raise WrongFlag(f"{name} {part}: expected FILE:SCALE")
    return found


def _spread(path: str, value: object) -> dict[str, object]:
    """The parameters behind the few flags that set something else than one of the same name."""
    match path:
        case "timeout":
            return {"timeout_read": value, "timeout_write": value}
        case "rerank":
            return {"embedding": True, "pooling_type": 4}
        case "log-all":
            return {"verbosity": 2**31 - 1}
        case "log-none":
            return {"verbosity": -1}
        case _:
            return {path: value}
