"""A tiny llama.cpp model whose greedy text is known in advance, with two LoRA adapters, made in milliseconds.

Run as a program: `python -m tests.engines.tiny_gguf FOLDER` (needs `gguf` and `numpy`, extra `test`).

Not noise, but a chain of words. A token's embedding is a random unit vector plus a constant direction shared by all.
The output row of a word is the embedding of its predecessor, so after word i comes word i+1; the output row of the
first word reads the shared direction, so any other token starts the chain:

    any prompt -> " w000" -> " w001" -> ... -> " w063" -> </s>       (finish_reason "stop", 65 tokens with the end)

Attention and feed-forward weights are small random numbers: real work for the engine, without influence on which token
wins. An adapter changes the output rows only: it lifts one token (" red", " blue") in every context, so that scale 1
gives " red red red ..." without an end (use max_tokens), and scale 0 gives the words. Exact text needs temperature 0.
Prompts are cut into single characters; the chat template is ChatML, and its text is part of the prompt's token count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray

ADAPTERS = ("red", "blue")
"""Names of the adapters; adapter NAME makes the model say " NAME" for ever, and is reported as task `say-NAME`."""

_SPACE = "\u2581"
"""What stands for a space inside tokens of this tokenizer."""

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_BOS, _EOS = 1, 2

Rows = NDArray[np.float32]


@attrs.frozen
class Shape:
    """How large the model is: more `embedding` and `layers` make it slow on purpose (for cancel and drain tests)."""

    context_tokens: int = 4096
    embedding: int = 64
    layers: int = 2
    words: int = 64
    seed: int = 1

    @property
    def heads(self) -> int:
        return max(1, self.embedding // 32)

    @property
    def kv_heads(self) -> int:
        return max(1, self.embedding // 64)

    @property
    def head_width(self) -> int:
        return self.embedding // self.heads


@attrs.frozen
class TinyModels:
    """Files of one model and its adapters."""

    model: Path
    adapters: dict[str, Path]


def words(count: int, first: int = 0) -> str:
    """The text that the model generates: `count` words from number `first` on."""
    return "".join(f" w{number:03d}" for number in range(first, first + count))


def make(folder: Path, shape: Shape = Shape()) -> TinyModels:
    """Write `tiny.gguf` and one `lora-NAME.gguf` per adapter into `folder`, which must exist."""
    tokens = _vocabulary(shape.words)
    model = folder / "tiny.gguf"
    _write_model(model, shape, tokens)
    adapters = {name: folder / f"lora-{name}.gguf" for name in ADAPTERS}
    for name, path in adapters.items():
        _write_adapter(path, name, shape, tokens)
    return TinyModels(model, adapters)


def _vocabulary(count: int) -> list[tuple[str, float, TokenType]]:
    """Tokens as (text, score, type). Every byte has one, so that no prompt is impossible."""
    tokens = [("<unk>", 0.0, TokenType.UNKNOWN), ("<s>", 0.0, TokenType.CONTROL), ("</s>", 0.0, TokenType.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)]
    tokens += [("<|im_start|>", 0.0, TokenType.CONTROL), ("<|im_end|>", 0.0, TokenType.CONTROL)]
    tokens += [(text, -1.0, TokenType.NORMAL) for text in (_SPACE, *map(chr, range(33, 127)))]
    tokens += [(_SPACE + name, -2.0, TokenType.NORMAL) for name in ADAPTERS]
    tokens += [(f"{_SPACE}w{number:03d}", -2.0, TokenType.NORMAL) for number in range(count)]
    return tokens


def _place(tokens: list[tuple[str, float, TokenType]], text: str) -> int:
    return next(index for index, token in enumerate(tokens) if token[0] == text)


def _write_model(path: Path, shape: Shape, tokens: list[tuple[str, float, TokenType]]) -> None:
    random = np.random.default_rng(shape.seed)
    width, feed_forward = shape.embedding, 2 * shape.embedding

    embeddings = random.standard_normal((len(tokens), width)).astype(np.float32)
    embeddings[:, 0] = 0
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    embeddings[:, 0] = 0.5

    # Logits of about 10.7 * sqrt(width) for the next word against 6.7 * sqrt(width) for the first: the chain wins.
    first = _place(tokens, f"{_SPACE}w000")
    output = np.zeros_like(embeddings)
    for word in range(shape.words):
        following = first + word + 1 if word + 1 < shape.words else _EOS
        output[following, 1:] = embeddings[first + word, 1:] * 12
    output[first, 0] = 15.0

    def noise(*size: int) -> Any:
        return random.standard_normal(size) * (0.02 / np.sqrt(size[-1]))

    tensors: list[tuple[str, Any]] = [("token_embd.weight", embeddings)]
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        tensors += [
            (block + "attn_norm.weight", np.ones(width)),
            (block + "attn_q.weight", noise(shape.heads * shape.head_width, width)),
            (block + "attn_k.weight", noise(shape.kv_heads * shape.head_width, width)),
            (block + "attn_v.weight", noise(shape.kv_heads * shape.head_width, width)),
            (block + "attn_output.weight", noise(width, shape.heads * shape.head_width)),
            (block + "ffn_norm.weight", np.ones(width)),
            (block + "ffn_gate.weight", noise(feed_forward, width)),
            (block + "ffn_up.weight", noise(feed_forward, width)),
            (block + "ffn_down.weight", noise(width, feed_forward)),
        ]
    tensors += [("output_norm.weight", np.ones(width)), ("output.weight", output)]

    writer = GGUFWriter(path, "llama")
    writer.add_type("model")
    writer.add_name("tiny-chain")
    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(0)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text for text, _, _ in tokens])
    writer.add_token_scores([score for _, score, _ in tokens])
    writer.add_token_types([int(kind) for _, _, kind in tokens])
    writer.add_bos_token_id(_BOS)
    writer.add_eos_token_id(_EOS)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(_CHATML)
    _finish(writer, tensors)


def _write_adapter(path: Path, name: str, shape: Shape, tokens: list[tuple[str, float, TokenType]]) -> None:
    rank = 4
    reads: Rows = np.zeros((rank, shape.embedding), np.float32)
    reads[0, 0] = 1.0  # the direction that all tokens share
    lifts: Rows = np.zeros((len(tokens), rank), np.float32)
    lifts[_place(tokens, _SPACE + name), 0] = 60.0

    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_name(f"lora-{name}")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    writer.add_string("adapter.lora.task_name", f"say-{name}")
    _finish(writer, [("output.weight.lora_a", reads), ("output.weight.lora_b", lifts)])


def _finish(writer: GGUFWriter, tensors: Iterable[tuple[str, Any]]) -> None:
    for name, rows in tensors:
        writer.add_tensor(name, np.ascontiguousarray(rows, np.float32), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    made = make(Path(sys.argv[1]))
    for file in (made.model, *made.adapters.values()):
        print(file, file.stat().st_size)
