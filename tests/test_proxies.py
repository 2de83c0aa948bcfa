"""Whose request it is behind proxies: the end of X-Forwarded-For is believed, as far as those who wrote it are."""

from __future__ import annotations

import pytest

from appliance.door.proxies import Proxies

TRUSTED = Proxies(("10.0.0.0/8", "192.0.2.1/32", "fd00::/8"))


@pytest.mark.parametrize(
    ("peer", "told", "client"),
    [
        # nobody is trusted, or nobody told anything
        ("203.0.113.9:5000", ["198.51.100.1"], "203.0.113.9:5000"),
        ("10.0.0.1:5000", [], "10.0.0.1:5000"),
        ("10.0.0.1:5000", [""], "10.0.0.1:5000"),
        ("local", ["198.51.100.1"], "local"),
        # one proxy, several, and what the client made up in front
        ("10.0.0.1:5000", ["198.51.100.1"], "198.51.100.1:0"),
        ("10.0.0.1:5000", ["1.1.1.1, 198.51.100.1"], "198.51.100.1:0"),
        ("10.0.0.1:5000", ["1.1.1.1,198.51.100.1 , 10.2.3.4"], "198.51.100.1:0"),
        ("10.0.0.1:5000", ["1.1.1.1", "198.51.100.1", "192.0.2.1"], "198.51.100.1:0"),
        ("10.0.0.1:5000", ["10.0.0.3, 10.0.0.2"], "10.0.0.3:0"),
        # other spellings
        ("10.0.0.1:5000", ["198.51.100.1:4321"], "198.51.100.1:0"),
        ("[fd00::1]:5000", ["2001:db8::1"], "[2001:db8::1]:0"),
        ("[fd00::1]:5000", ["[2001:DB8::1]:443"], "[2001:db8::1]:0"),
        ("[fd00::1]:5000", ["[2001:db8::1]"], "[2001:db8::1]:0"),
        ("10.0.0.1:5000", ["::ffff:198.51.100.1"], "198.51.100.1:0"),
        ("[::ffff:10.0.0.1]:5000", ["198.51.100.1"], "198.51.100.1:0"),
        ("[fd00::1%eth0]:5000", ["198.51.100.1"], "198.51.100.1:0"),
        # words that are no address end the belief
        ("10.0.0.1:5000", ["unknown"], "10.0.0.1:5000"),
        ("10.0.0.1:5000", ["1.1.1.1, unknown, 10.0.0.2"], "10.0.0.2:0"),
        ("10.0.0.1:5000", ["1.1.1.1, 10.0.0.2,"], "10.0.0.1:5000"),
        ("10.0.0.1:5000", ["\xff\x00"], "10.0.0.1:5000"),
        ("10.0.0.1:5000", ["999.1.1.1"], "10.0.0.1:5000"),
    ],
)
def test_the_client_behind_a_peer(peer: str, told: list[str], client: str) -> None:
    fields = [(b"host", b"x"), *((b"x-forwarded-for", value.encode("latin-1")) for value in told)]
    assert TRUSTED.client_of(peer, fields) == client
