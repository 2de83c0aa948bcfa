"""Where the program begins when it runs from a folder of its own. `build.spec` names this file."""

import os
import sys

from appliance import bootenv

bootenv.clean(os.environ, sys._MEIPASS)  # type: ignore[attr-defined]  # the starter's name for the folder

from appliance.cli.main import main  # noqa: E402  after the cleaning, which comes before everything

main()
