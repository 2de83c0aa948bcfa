"""How long one engine has been loading and silent, by a clock that nobody sets.

The machine's own clock is set at every start of it, by hours or years where it has no battery. Told by that clock, an
engine that began a second ago may have been loading since 1970.
"""

from __future__ import annotations

import trio

from appliance.agent import logs
from appliance.rules.engines.patience import Patience


class Loading:
    """One engine that loads. `before_s` is how long it did so before this agent, as far as that is known; its silence
    counts from now."""

    def __init__(self, log: str, patience: Patience, weight_bytes: int, before_s: float) -> None:
        self._log = log
        self._patience = patience
        self._weight_bytes = weight_bytes
        self._heard_at = trio.current_time()
        self._since = self._heard_at - max(0.0, before_s)
        self._output = logs.last_output(log)

    def why_over(self) -> str:
        """Why it has failed, "" while it may go on. Looks at the log."""
        now, output = trio.current_time(), logs.last_output(self._log)
        if output != self._output:
            self._output, self._heard_at = output, now
        return self._patience.why_over(now, self._since, self._heard_at, self._weight_bytes)
