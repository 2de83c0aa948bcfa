"""Fixtures that more than one area of tests uses."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import settings

if TYPE_CHECKING:
    from tests.engines.llama_engine import LlamaEngine
    from tests.engines.tiny_gguf import TinyModels

for name in ("COLUMNS", "LINES"):  # a second process of pytest has them, and a pipe has no width
    os.environ.pop(name, None)
os.environ |= {"MENTAT_DAEMONS": "", "MENTAT_ANNOUNCE_PORT": "0"}
"""Routers of tests find no groups: neither a daemon of this machine, nor each other, nor whoever announces on its
network. A test of groups says otherwise itself."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell starts what is to run in the background with SIGINT ignored, and so would be all that tests start."""

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
"""The suite draws the same examples each time, so that a change is judged by what it changed; `make explore` draws
others. No deadlines: they would time the machine."""


@pytest.fixture(autouse=True)
def fresh_process() -> None:
    """What a command sets once in a process: where its log goes, and the width of the console of `ctl`. A test would
    get what another one has left."""
    structlog.reset_defaults()
    screen = sys.modules.get("appliance.cli.ctl.screen")
    if screen is not None:
        screen.console.cache_clear()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """The model with known text and its adapters, as files (`tests/engines/tiny_gguf.py` says what it answers)."""
    # Imported here: numpy costs a tenth of a second that tests without an engine need not pay.
    from tests.engines import tiny_gguf

    return tiny_gguf.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def llama_engine(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaEngine]:
    """A real llama.cpp server on the tiny model: alias `tiny`, 2 slots of 2048 tokens, metrics on, both adapters at 0.

    Shared by the whole session, so a test must not stop it, and must leave its slots free.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed (extra `demo`)")
    from tests.engines.llama_engine import serving

    adapters = ",".join(f"{path}:0" for path in tiny_models.adapters.values())
    log = tmp_path_factory.mktemp("llama") / "stderr"
    with serving(tiny_models, log, "--metrics", "--lora-scaled", adapters) as engine:
        yield engine


@pytest.fixture(scope="session")
def llama_url(llama_engine: LlamaEngine) -> str:
    """Address of `llama_engine`, without a trailing slash and without `/v1`."""
    return llama_engine.url
