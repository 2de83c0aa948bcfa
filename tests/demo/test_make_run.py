"""`make run`'s program with the real engine and the real model: what it prints works as printed, and it ends whole."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anthropic
import attrs
import openai
import pytest

from appliance.demo.ports import any_free

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="the extra `demo` is not installed"
)

PROJECT = Path(__file__).parent.parent.parent
MODEL = "gemma-3-270m"
QUESTION = {"role": "user", "content": "What is the capital of France?"}


@attrs.frozen
class Demo:
    """A running demonstration, and all it printed until it was ready."""

    process: subprocess.Popen[str]
    text: str

    @property
    def url(self) -> str:
        found = re.search(r"answers at (\S+)/v1", self.text)
        assert found, self.text
        return found[1]

    def descendants(self) -> list[int]:
        """Pids of the processes it started."""
        # Not from /proc/PID/task/PID/children: the kernel may leave some out while others end.
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parent = stat.read_text().rpartition(")")[2].split()[1]
                found += [int(stat.parent.name)] if int(parent) == self.process.pid else []
        return found


def run_demo(port: int, folder: Path) -> Demo:
    """Start one whose temporary files go into `folder`, and read what it prints until it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "appliance.demo.main", "--port", str(port)],
        cwd=PROJECT,
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if "Ctrl-C stops everything" in line:
            break
    assert process.poll() is None, text
    return Demo(process, text)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    running = run_demo(any_free(), tmp_path_factory.mktemp("demo"))
    yield running
    running.process.send_signal(signal.SIGINT)
    running.process.wait(timeout=30)


def printed(text: str, first: str, last: str) -> str:
    """The part of the printed text from the line that begins with `first` up to the line that ends with `last`."""
    found = re.search(rf"^{first}.*?{last}$", text, re.M | re.S)
    assert found, text
    return found[0]


def shell(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_line_works_as_printed(demo: Demo) -> None:
    answer = shell(printed(demo.text, "curl", "'"))
    assert "Paris" in answer
    # Only llama.cpp says how long its phases took.
    assert '"timings"' in answer


def test_the_python_lines_work_as_printed(demo: Demo) -> None:
    answer = shell(printed(demo.text, "[^ ]*python[^ ]* - <<'END'", "END"))
    assert "Paris" in answer
    assert re.search(r"\(\d+ tokens\)", answer)


def test_the_openai_client_streams_a_real_answer_with_usage_and_timings(demo: Demo) -> None:
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none")
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[QUESTION],  # type: ignore[list-item]
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text.startswith(" Paris")
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert usage.completion_tokens == 8
    (timings,) = [
        chunk.model_extra["timings"] for chunk in chunks if chunk.model_extra and "timings" in chunk.model_extra
    ]
    assert timings["predicted_n"] == 8


def test_the_anthropic_client_gets_an_answer(demo: Demo) -> None:
    client = anthropic.Anthropic(base_url=demo.url, api_key="none")
    message = client.messages.create(
        model=MODEL,
        max_tokens=8,
        messages=[QUESTION],  # type: ignore[list-item]
    )
    assert message.usage.output_tokens == 8
    assert message.content[0].type == "text"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_its_end_leaves_no_process_and_no_file(tmp_path: Path, end: signal.Signals) -> None:
    demo = run_demo(any_free(), tmp_path)
    started = demo.descendants()
    assert len(started) == 2
    assert len(list(tmp_path.iterdir())) == 1
    demo.process.send_signal(end)
    assert demo.process.wait(timeout=30) == 0
    assert [pid for pid in started if os.path.exists(f"/proc/{pid}")] == []
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_the_engine_ends_it_with_the_reason(tmp_path: Path) -> None:
    demo = run_demo(any_free(), tmp_path)
    started = demo.descendants()
    (engine,) = [pid for pid in started if b"llama" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(engine, signal.SIGKILL)
    rest, _ = demo.process.communicate(timeout=30)
    assert demo.process.returncode == 1
    assert "llama.cpp ended (signal 9)" in rest
    assert [pid for pid in started if os.path.exists(f"/proc/{pid}")] == []
