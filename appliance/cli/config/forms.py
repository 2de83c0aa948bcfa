"""Written forms of strings: each turns the text of a key into its value, or says what was expected.

A form raises `Mismatch`; its message, where it has one, is more telling than the general expectation.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, urlsplit

import attrs

from appliance.cli.config.quote import UNPRINTABLE
from appliance.facts.groups import DAEMON_PORT
from appliance.facts.settings import Address, EngineUrl

_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?", re.I)
_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*", re.I)
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Mismatch(ValueError):
    """A text that has not the form. The message, when there is one, completes "expected ..."."""


@attrs.frozen
class Form:
    expected: str
    parse: Callable[[str], Any]


def address(text: str) -> Address:
    """`localhost` is 127.0.0.1, without a look-up: an empty root file system has no /etc/hosts to find it in."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise Mismatch
    if host.lower() == "localhost":
        return Address("127.0.0.1", int(port))
    try:
        ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        raise Mismatch from None
    if bracketed != (ip.version == 6):
        raise Mismatch
    return Address(str(ip), int(port))


def engine_url(text: str) -> EngineUrl:
    url = _split(text)
    if url.username is not None or url.password is not None:
        raise Mismatch("a URL without user name and password (an endpoint's key goes into api_key_file)")
    if url.query or url.fragment or "?" in text or "#" in text:
        raise Mismatch("a URL without ? and #")
    path = url.path.rstrip("/")
    path = path.removesuffix("/v1")
    if not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
        raise Mismatch("a URL whose path is plain and has no empty, . or .. part")
    tls = url.scheme == "https"
    return EngineUrl(tls, url.hostname or "", _port(url) or (443 if tls else 80), path)


def collector(text: str) -> str:
    if text:
        url = _split(text)
        if url.query or url.fragment:
            raise Mismatch("a URL without ? and #")
    return text.rstrip("/")


def origin(text: str) -> str:
    """As browsers send it: lower case, without the scheme's own port. Other schemes are desktop applications'."""
    scheme, _, rest = text.partition("://")
    if not _SCHEME.fullmatch(scheme) or not rest or set(rest) & set("/?#@*\\ \t"):
        raise Mismatch
    url = _authority(text)
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    port = _port(url)
    scheme = scheme.lower()
    return f"{scheme}://{host}" + (f":{port}" if port and port != _DEFAULT_PORTS.get(scheme) else "")


def network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        if "host bits" in str(error):
            network = ipaddress.ip_network(text, strict=False)
            raise Mismatch(f"a network without host bits ({network}) or a single address") from None
        raise Mismatch from None


def name(text: str) -> str:
    if not text or text != text.strip():
        raise Mismatch
    return text


def word(text: str) -> str:
    if text and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", text):
        raise Mismatch
    return text


def ip(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text)) if text else ""
    except ValueError:
        raise Mismatch from None


def program(text: str) -> str:
    if not text or text != text.strip():
        raise Mismatch
    return text


def control_url(text: str) -> str:
    """Where agents call; without a port 6384 is meant, which is where the control plane listens."""
    if not text:
        return ""
    if re.search(r"\s", text) or UNPRINTABLE.search(text):
        raise Mismatch
    url = _authority(text)
    if url.scheme != "wss" or url.path not in ("", "/") or url.query or url.fragment or url.username is not None:
        raise Mismatch
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    return f"wss://{host}:{_port(url) or 6384}"


def daemon(text: str) -> str:
    """A daemon's HTTP address as `host:port`; without a port the one that daemons have."""
    return _host_port(text, DAEMON_PORT)


def announce_addr(text: str) -> str:
    return _host_port(text, 0)


def _host_port(text: str, default: int) -> str:
    """`host`, `host:port` or `[v6]:port`; without a port the default is added, where there is one."""
    if not text or re.search(r"[\s/@?#]", text):
        raise Mismatch
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"
    url = _authority(f"any://{text}")
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    port = _port(url) or default
    return f"{host}:{port}" if port else f"{host}"


def source(text: str) -> str:
    """`local`, a network, an address, or the beginning of one as it is written ("10.0.")."""
    if text == "local":
        return text
    try:
        return str(ipaddress.ip_network(text, strict=False)) if "/" in text else str(ipaddress.ip_address(text))
    except ValueError:
        if not re.fullmatch(r"[0-9A-Fa-f.:]+", text):
            raise Mismatch from None
        return text.lower()


def store_url(text: str) -> str:
    """Like SQLAlchemy's: three slashes and a relative path, or four for an absolute one."""
    if not text:
        return ""
    scheme, _, path = text.partition(":///")
    if scheme.startswith("postgres"):
        raise Mismatch("sqlite:///path, since this version keeps its database in SQLite only")
    if scheme != "sqlite" or not path or "?" in path or "#" in path:
        raise Mismatch
    return text


def _split(text: str) -> SplitResult:
    """An http or https URL with a valid host. Spaces are refused first: `urlsplit` drops some of them silently."""
    if re.search(r"\s", text) or UNPRINTABLE.search(text):
        raise Mismatch
    url = _authority(text)
    if url.scheme not in ("http", "https"):
        raise Mismatch
    return url


def _authority(text: str) -> SplitResult:
    """A URL of any scheme whose host and port are valid."""
    try:
        url = urlsplit(text)
        host, _ = url.hostname, url.port
        if host and ":" in host:
            ipaddress.IPv6Address(host)
        elif not host or not _HOST.fullmatch(host):
            raise Mismatch
        elif re.fullmatch(r"[0-9.]+", host):
            ipaddress.IPv4Address(host)  # 10.0.0.256 is a fault, not the name of a machine
    except ValueError:
        raise Mismatch from None
    if url.port == 0 or url.netloc.endswith(":"):
        raise Mismatch("a port from 1 to 65535 after the colon")
    return url


def _port(url: SplitResult) -> int:
    return url.port or 0


FORMS: dict[str, Form] = {
    "collector": Form("http:// or https:// with a host", collector),
    "origin": Form('an origin such as "https://chat.example.org" (scheme, host, port if unusual, no path)', origin),
    "network": Form('an address or a network such as "10.0.0.0/24"', network),
    "word": Form("at most 63 letters, digits and . _ -, a letter or digit first", word),
    "ip": Form('a numeric address such as "10.0.0.5"', ip),
    "control_url": Form('wss://, a host and perhaps a port, such as "wss://box:6384"', control_url),
    "store_url": Form('sqlite:/// and a path, such as "sqlite:////var/lib/appliance/appliance.db"', store_url),
    "daemon": Form('a host and perhaps a port, such as "10.0.0.5:6380"', daemon),
    "announce_addr": Form('a host and perhaps a port, such as "10.0.0.5:6382"', announce_addr),
    "source": Form('"local", a network, an address or the beginning of one, such as "10.0."', source),
    "universe": Form("a name", str.strip),
    "secret": Form("a string", str),
    "secret_file": Form("the path of a file", str),
    "program": Form("the name or the path of a program", program),
    "name": Form("a name without spaces around it", name),
    "file": Form("the path of a file", str),
    "key_file": Form("the path of a file", str),
    "socket": Form("the path of a Unix socket", str),
}
"""By the `form` of a key. Those in `PATHS` are made absolute before they come here; `files.py` opens the files."""

TYPES: dict[type, Form] = {
    Address: Form('a numeric address with a port, such as "0.0.0.0:6381" or "[::]:6381"', address),
    EngineUrl: Form("http:// or https:// with a host", engine_url),
}
"""By the type of a key that is written as a string."""

PATHS = ("file", "key_file", "secret_file", "socket")
