"""Which ports the demonstration takes."""

from __future__ import annotations

import socket

import pytest

from appliance.demo.ports import any_free, first_free


def test_a_free_port_is_taken_as_it_is() -> None:
    port = any_free()
    assert first_free(port) == port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_on_which_somebody_listens_is_passed_over(host: str) -> None:
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        assert first_free(port) > port


def test_a_port_meant_for_something_else_is_passed_over() -> None:
    port = any_free()
    assert first_free(port, port) > port
