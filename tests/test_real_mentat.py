"""The real daemon and the real router of the mentat project, beside ours, on a network of their own. `make test-mentat`
runs this with the programs in the folder that TEST_MENTAT_ROOT names; `make test` skips it.

What the programs print goes to files under pytest's own folder; a failure shows where.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lan import Host, lan, until

ROOT = os.path.abspath(given) if (given := os.environ.get("TEST_MENTAT_ROOT")) else ""
DAEMON, ROUTER = f"{ROOT}/bin/mentatd", f"{ROOT}/bin/mentatd-serve"

pytestmark = pytest.mark.skipif(
    not os.access(DAEMON, os.X_OK) or not os.access(ROUTER, os.X_OK),
    reason="TEST_MENTAT_ROOT names no folder with bin/mentatd and bin/mentatd-serve; `make test-mentat` does",
)

SHARED = {"MENTAT_SECRET": "s3cret", "MENTAT_UNIVERSE": "default"}
QUICK = {"PROBE_INTERVAL_S": "0.5", "PROBE_TIMEOUT_S": "1", "POLL_INTERVAL_S": "1", "MODEL_WAIT_S": "1"}


@pytest.fixture
def net(tmp_path: Path) -> Iterator[dict[str, Host]]:
    with lan(tmp_path, "daemon", "node", "ours", "theirs") as hosts:
        yield hosts


def models(router: Host) -> set[str]:
    return {row["id"] for row in router.get("/v1/models")["data"]}


def groups(router: Host) -> dict[str, Any]:
    return {name: row["why_not"] for name, row in router.get("/status.json")["groups"].items()}


def start(net: dict[str, Host]) -> None:
    """The real daemon; an engine with our agent beside it; both routers."""
    net["daemon"].run(DAEMON, **SHARED)
    net["node"].start("sim", "--host", "0.0.0.0", "--port", "8000", "--model", "m")
    net["node"].start("agent", "register", MENTAT_GROUP="glm", MENTAT_OPENAI_API="8000/v1", **SHARED)
    net["node"].start(
        "agent", "register",
        MENTAT_GROUP="shut", MENTAT_OPENAI_API="8001/v1", APPLIANCE_AGENT__LISTEN="0.0.0.0:6390", **SHARED,
    )  # fmt: skip
    net["ours"].start("serve", **SHARED, **QUICK)
    net["theirs"].run(ROUTER, ALLOWED_SOURCES="local", **SHARED, **QUICK)


def test_both_routers_say_the_same(net: dict[str, Host]) -> None:
    start(net)
    daemon = f"{net['daemon'].address}:6380"
    for router in (net["ours"], net["theirs"]):
        until(
            "the real daemon is read", lambda router=router: router.get("/status.json")["daemons"][daemon]["connected"]
        )
        until("our agent's model is listed", lambda router=router: models(router) == {"m"})
        until("the other group is gated", lambda router=router: groups(router)["shut"])
        ask = {"model": "m", "stream": True, "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
        status, body = router.ask("POST", "/v1/chat/completions", ask)
        assert (status, "data: [DONE]" in body) == (200, True)
    ours, theirs = groups(net["ours"]), groups(net["theirs"])
    assert ours.keys() == theirs.keys()
    assert ours["glm"] is theirs["glm"] is None
    for why in (ours["shut"], theirs["shut"]):  # the reason in the middle is each program's own word for "refused"
        assert why.startswith(f"endpoint probe failed: http://{net['node'].address}:8001/v1: ")
