"""docs/security.md says what the code does: every word of a refusal, every length of time, every port."""

from __future__ import annotations

import re
from pathlib import Path

from appliance.control import guesses, joining, pki
from appliance.facts.settings import Settings
from appliance.wire.tls import CONTROL_NAME

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()
DAY_S = 86400.0


def test_every_word_of_a_refusal_to_join_is_explained() -> None:
    source = (ROOT / "appliance" / "control" / "joining.py").read_text()
    source += (ROOT / "appliance" / "control" / "pki.py").read_text()
    words = set(re.findall(r'(?:Refusal\(\s*\d+,\s*|CsrRefused\()"(\w+)"', source))
    assert {"token_used", "invalid_csr", "too_many_tries"} <= words
    # what operators are told in ctl, and HTTP's own, are no words of joining
    for word in words - {"bad_name", "bad_host", "node_not_found", "not_found", "method_not_allowed"}:
        assert f"`{word}`" in PAGE, word


def test_the_times_are_those_of_the_code() -> None:
    assert f"| root | {pki.ROOT_S / DAY_S / 365:.0f} years |" in PAGE
    assert f"| control plane | {pki.SERVER_S / DAY_S:.0f} days | at a start and daily, when " in PAGE
    assert f"when {pki.SERVER_DUE_S / DAY_S:.0f} days are left" in PAGE
    assert f"| node | {pki.NODE_S / DAY_S:.0f} days | by the agent over the link" in PAGE
    assert joining.CARE_S == DAY_S and pki.BACK_S == DAY_S
    assert joining.TOKEN_S == 3600
    assert (guesses.ALLOWED, guesses.WITHIN_S) == (10, 60.0)


def test_the_ports_are_the_defaults() -> None:
    settings = Settings()
    for name, addresses in (
        ("server.listen", settings.server.listen),
        ("control.listen", settings.control.listen),
        ("server.metrics_listen", settings.server.metrics_listen),
        ("agent.listen", settings.agent.listen),
    ):
        assert f"| {addresses[0].port} `{name}` |" in PAGE
    assert f"| {settings.agent.port_range[0]}-{settings.agent.port_range[1]} `agent.port_range` |" in PAGE
    assert f"`{CONTROL_NAME}`" in PAGE


def test_every_page_is_listed() -> None:
    assert "docs/security.md" in (ROOT / "README.md").read_text()
