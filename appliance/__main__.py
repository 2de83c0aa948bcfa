"""`python -m appliance`: the command without its console script."""

from __future__ import annotations

from appliance.cli.main import main

if __name__ == "__main__":
    main()
