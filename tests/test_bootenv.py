"""What the frozen program leaves of its environment for its children."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.bootenv import clean

FOLDER = "/opt/appliance/_internal"
HOSTS = {"HOME": "/root", "PATH": "/bin", "SSL_CERT_FILE": "/etc/roots.pem", "OTEL_SERVICE_NAME": "x"}


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, {}),
        ({"LD_LIBRARY_PATH": FOLDER}, {}),
        (
            {"LD_LIBRARY_PATH": f"{FOLDER}:/opt/lib", "LD_LIBRARY_PATH_ORIG": "/opt/lib"},
            {"LD_LIBRARY_PATH": "/opt/lib"},
        ),
        ({"LD_LIBRARY_PATH": f"{FOLDER}:", "LD_LIBRARY_PATH_ORIG": ""}, {"LD_LIBRARY_PATH": ""}),
        ({"LD_LIBRARY_PATH": "/opt/lib"}, {"LD_LIBRARY_PATH": "/opt/lib"}),
        ({"LD_LIBRARY_PATH": f"{FOLDER}-of-another"}, {"LD_LIBRARY_PATH": f"{FOLDER}-of-another"}),
        ({"_PYI_ARCHIVE_FILE": "x", "_PYI_PARENT_PROCESS_LEVEL": "0", "_MEIPASS2": "x"}, {}),
        ({"PYINSTALLER_RESET_ENVIRONMENT": "1"}, {}),
        ({"OPENSSL_MODULES": f"{FOLDER}/ossl-modules"}, {}),
        ({"OPENSSL_MODULES": "/usr/lib/ossl-modules"}, {"OPENSSL_MODULES": "/usr/lib/ossl-modules"}),
    ],
)
def test_children_find_what_was_there_before(given: dict[str, str], left: dict[str, str]) -> None:
    environ = HOSTS | given
    clean(environ, FOLDER)
    assert environ == HOSTS | left


@given(st.dictionaries(st.text(), st.text()))
def test_cleaning_twice_is_cleaning_once(environ: dict[str, str]) -> None:
    environ.pop("LD_LIBRARY_PATH_ORIG", None)
    clean(environ, FOLDER)
    once = dict(environ)
    clean(environ, FOLDER)
    assert environ == once
