"""What an agent concludes: from time and silence, from an engine's answers, from what a driver says, from a log."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.agent import logs, sockets
from appliance.agent.gpumemory import still_held
from appliance.agent.ready import served
from appliance.facts.hardware import GIB, Gpu, Holder
from appliance.rules.engines.patience import Patience

moments = st.floats(0, 1e6)


@given(moments, moments, moments, st.integers(0, 1 << 42))
def test_loading_ends_only_after_its_time_and_in_silence(since: float, later: float, said: float, size: int) -> None:
    patience, now = Patience(), since + later
    why = patience.why_over(now, since, since + said, size)
    assert bool(why) == (later > 600 + size / 100e6 and now - (since + said) > 300)
    # More to read never shortens it, and neither does more to say.
    if not why:
        assert not patience.why_over(now, since, since + said, size + GIB)
        assert not patience.why_over(now, since, now, size)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, ["a", "b"]),
        ({"data": [{"id": "a", "aliases": ["b"]}], "models": [{"name": "c"}]}, ["a", "b"]),
        ({"data": []}, []),
        ({"data": None}, None),
        ({"data": ["a"]}, None),
        ([], None),
        ({"error": "Loading model"}, None),
    ],
)
def test_names_an_engine_serves(body: object, names: list[str] | None) -> None:
    assert served(json.dumps(body).encode()) == names


def test_an_answer_that_is_no_json_names_nothing() -> None:
    assert served(b"<html>") is None
    assert served(b"\xff") is None


def test_memory_that_is_not_back_is_told_with_those_who_hold_it() -> None:
    def gpu(used: int | None, *pids: int) -> Gpu:
        return Gpu("GPU-1", 1, "x", used_bytes=used, holders=tuple(Holder(pid) for pid in pids))

    assert still_held([gpu(3 * GIB, 7, 8)], ["GPU-1"], {}) == [
        "GPU 1: 3072 MiB still in use, held by pid 7, pid 8",
    ]
    assert still_held([gpu(3 * GIB)], ["GPU-1"], {}) == [
        "GPU 1: 3072 MiB still in use, by processes that cannot be seen"
    ]
    # A driver's own share, what was there before, a card of others, one that is gone, one that does not tell.
    assert still_held([gpu(GIB)], ["GPU-1"], {}) == []
    assert still_held([gpu(3 * GIB)], ["GPU-1"], {"GPU-1": 3 * GIB}) == []
    assert still_held([gpu(3 * GIB)], ["GPU-2"], {}) == []
    assert still_held([], ["GPU-1"], {}) == []
    assert still_held([gpu(None)], ["GPU-1"], {}) == []


@given(st.integers(0, 300), st.integers(0, 300))
def test_no_part_of_a_key_is_shown_wherever_the_tail_is_cut(before: int, after: int) -> None:
    secret = "sk-0123456789abcdef"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        # One line without an end, longer than what is read of it, with the key about where the cut is.
        log.write_text("x" * before + secret + "y" * (64 * 1024 - 150 + after))
        shown = "\n".join(logs.tail(str(log), 5, [secret]))
    assert not any(secret[at : at + 6] in shown for at in range(len(secret) - 5))


def test_the_tail_goes_back_into_what_was_cut_off(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "log.1").write_text("one\n\x1b[31mtwo\x1b[0m\nthr")
    log.write_text("four\r\rfive\n\n")
    assert logs.tail(str(log), 3) == ["thr", "four", "five"]
    # The first line of what was cut off may lack its beginning.
    assert logs.tail(str(log), 9) == ["two", "thr", "four", "five"]
    assert logs.tail(str(log), 0) == []
    assert logs.tail(str(tmp_path / "none"), 3) == []
    # A new start shows nothing of the one before.
    logs.begin(str(log))
    assert logs.tail(str(log), 3) == []
    assert (tmp_path / "log.before").read_text().startswith("four")


def test_values_of_variables_that_are_keys_by_name() -> None:
    environment = {
        "HF_TOKEN": "hf_abcdef",
        "VLLM_API_KEY": "k3y-k3y",
        "TOKENIZERS_PARALLELISM": "false-ish",
        "A_KEY": "1",
    }
    assert logs.secrets_of(environment.items()) == {"hf_abcdef", "k3y-k3y"}


def test_ports_that_are_bound_and_ports_that_are_listened_on() -> None:
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0)) as listening:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports = [sock.getsockname()[1] for sock in (bound, listening, free)]
        assert sockets.taken(ports) == set(ports[:2])
        assert sockets.listened_on(ports) == {ports[1]}
        assert sockets.strangers(ports, []) == {ports[1]}
        assert sockets.strangers(ports, [os.getpid()]) == set()
