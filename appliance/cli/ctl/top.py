"""`appliance ctl top`: what the router does now, drawn again each second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import attrs
import click
from rich.text import Text

from .asking import Refused, ask, reads
from .bands import print_bands
from .endpoints import print_endpoints
from .requests import print_requests
from .screen import console, print_json, print_lines, print_pairs, size
from .status import head_line, requests_line, waiting_line

EVERY_S = 1.0
"""An answer costs the router about a millisecond."""
REQUESTS = 20
"""How many are shown where there is no screen to fill."""
TROUBLES = 3


@attrs.frozen
class Look:
    """What was asked for at one moment, `at` in seconds of a clock that never goes back."""

    at: float
    status: dict[str, Any]
    bands: list[dict[str, Any]]
    endpoints: list[dict[str, Any]]
    requests: list[dict[str, Any]]

    def a_second(self, before: Look | None) -> float | None:
        """Requests that ended in a second since `before`; None where that was another router, or nothing."""
        if before is None or self.status["pid"] != before.status["pid"] or self.at <= before.at:
            return None
        return (self.status["requests"]["ended"] - before.status["requests"]["ended"]) / (self.at - before.at)


@click.command()
@reads
def top(as_json: bool) -> None:
    """Load, endpoints and requests as they are now, again each second until Ctrl-C.

    The busiest endpoints and the running requests come first, as many as the screen holds. Into a pipe, and with
    --json, they are told once.
    """
    if as_json:
        look = _look(REQUESTS)
        print_json({name: getattr(look, name) for name in ("status", "bands", "endpoints", "requests")})
    elif console().is_terminal:
        _watch()
    else:
        _show(_look(REQUESTS), None, None)


def _watch() -> None:
    """Draw until Ctrl-C. A router that is gone for a while (it restarts) is asked again; only the first question must
    be answered. Raises ClickException."""
    out = console()
    look: Look | None = _look(out.height)
    before: Look | None = None
    told = ""
    out.set_alt_screen(True)
    out.show_cursor(False)
    try:
        while True:
            with out.capture() as page:
                if look is not None:
                    _show(look, look.a_second(before), out.height)
                else:
                    print_lines([Text(told, style="red"), "asked again each second; Ctrl-C ends it"])
            # Over what stands there, line by line: a screen that is cleared first flickers.
            lines = page.get().splitlines()[: out.height]
            out.file.write("\x1b[H" + "\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J")
            out.file.flush()
            time.sleep(EVERY_S)
            before = look
            try:
                look = _look(out.height)
            except Refused:
                raise
            except click.ClickException as error:
                look, told = None, error.message
    except KeyboardInterrupt:
        return
    finally:
        out.show_cursor(True)
        out.set_alt_screen(False)


def _look(requests: int) -> Look:
    return Look(
        at=time.monotonic(),
        status=ask("status"),
        bands=ask("bands")["bands"],
        endpoints=ask("endpoints")["endpoints"],
        requests=ask("requests", limit=max(1, min(requests, 4000)))["requests"],
    )


def _show(look: Look, a_second: float | None, height: int | None) -> None:
    """The page. `height`: lines there are, None for as many as it takes."""
    status = look.status
    out = console()
    out.print(head_line(status))
    rate = "" if a_second is None else f"; {a_second:.1f} a second"
    print_pairs(
        [
            ("requests", requests_line(status["requests"]) + rate),
            ("waiting", waiting_line(status["waiting"])),
            ("endpoints", f"{status['endpoints']['up']} of {status['endpoints']['known']} up"),
            ("memory", size(status["rss_bytes"])),
        ]
    )
    if troubles := status["troubles"]:
        more = [f"and {len(troubles) - TROUBLES:,} more: ctl status"] if len(troubles) > TROUBLES else []
        print_lines([Text(trouble, style="yellow") for trouble in (*troubles[:TROUBLES], *more)])
    if any(status["waiting"].values()):
        out.print()
        print_bands(look.bands)
    if look.endpoints:
        out.print()
        busiest = sorted(look.endpoints, key=_busy, reverse=True)
        print_endpoints(busiest if height is None else busiest[: max(3, height // 3)])
    if look.requests:
        out.print()
        print_requests(look.requests)


def _busy(endpoint: Mapping[str, Any]) -> tuple[float, int]:
    return (endpoint["saturation"] or 0.0, endpoint["in_flight"])
