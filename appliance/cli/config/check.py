"""Rules between keys: what each key allows by itself, but the whole does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator

from appliance.cli.config.quote import toml_value
from appliance.facts import bands
from appliance.facts.catalog import Scaling
from appliance.facts.errors import Fault
from appliance.facts.settings import Address, Settings

SOCKET_PATH_LIMIT = 107
"""Longest path of a Unix socket in bytes: Linux keeps 108 for it, with the final zero."""


def check(settings: Settings, faulty: Collection[str] = ()) -> list[Fault]:
    """All faults between keys. `faulty` holds the paths that failed already: their values are placeholders, and what
    only follows from them is not told as well."""
    return [fault for rule in _RULES for fault in rule(settings, faulty)]


def _listeners(settings: Settings, faulty: Collection[str]) -> Iterator[Fault]:
    server = settings.server
    seen: dict[Address, str] = {}
    for path, addresses in (
        ("server.listen", server.listen),
        ("server.metrics_listen", server.metrics_listen),
        ("agent.listen", settings.agent.listen),
        ("control.listen", settings.control.listen),
    ):
        if any(fault.startswith(path) for fault in faulty):
            continue
        for i, address in enumerate(addresses):
            here = path if len(addresses) == 1 else f"{path}[{i}]"
            if address.port and address in seen:
                yield Fault(here, f"expected another address than {seen[address]}, got {toml_value(str(address))}")
            seen.setdefault(address, here)


def _socket(settings: Settings, _: Collection[str]) -> Iterator[Fault]:
    socket = settings.server.admin_socket
    if len(socket.encode()) > SOCKET_PATH_LIMIT:
        yield Fault("server.admin_socket", f"expected at most {SOCKET_PATH_LIMIT} bytes, got {toml_value(socket)}")


def _tls_pair(settings: Settings, faulty: Collection[str]) -> Iterator[Fault]:
    cert, key = settings.server.tls_cert, settings.server.tls_key
    if bool(cert) != bool(key) and not {"server.tls_cert", "server.tls_key"} & set(faulty):
        given, missing = ("server.tls_cert", "server.tls_key") if cert else ("server.tls_key", "server.tls_cert")
        yield Fault(missing, f"missing; expected the path of a file, since {given} is set")


def _buffers(settings: Settings, faulty: Collection[str]) -> Iterator[Fault]:
    server = settings.server
    if server.max_buffered_bytes < server.max_body_bytes and "server.max_body_bytes" not in faulty:
        yield Fault(
            "server.max_buffered_bytes",
            f"expected at least max_body_bytes ({server.max_body_bytes}), or the largest body could never come in,"
            f" got {server.max_buffered_bytes}",
        )


def _endpoint_ids(settings: Settings, faulty: Collection[str]) -> Iterator[Fault]:
    ids = [(f"endpoints[{i}].id", endpoint.id) for i, endpoint in enumerate(settings.endpoints)]
    yield from _twice(ids, faulty)


def _model_names(settings: Settings, faulty: Collection[str]) -> Iterator[Fault]:
    yield from _twice([(f"models[{i}].name", model.name) for i, model in enumerate(settings.models)], faulty)


def _twice(named: list[tuple[str, str]], faulty: Collection[str]) -> Iterator[Fault]:
    first: dict[str, str] = {}
    for path, name in named:
        if path in faulty:
            continue
        if name in first:
            yield Fault(path, f"expected a unique name, got {toml_value(name)}, which is {first[name]} already")
        first.setdefault(name, path)


def _aliases(settings: Settings, faulty: Collection[str]) -> Iterator[Fault]:
    models = _models(settings, faulty)
    taken: dict[str, str] = {}
    for i, model in enumerate(settings.models):
        for j, alias in enumerate(model.aliases):
            path = _item(f"models[{i}].aliases", j, model.aliases)
            if path in faulty:
                continue
            if alias in models:
                yield Fault(path, f"{toml_value(alias)} shadows the model of that name ({models[alias]})")
            elif alias in taken:
                yield Fault(path, f"{toml_value(alias)} is an alias already ({taken[alias]})")
            taken.setdefault(alias, path)


def _fallbacks(settings: Settings, faulty: Collection[str]) -> Iterator[Fault]:
    """Names that nothing serves, names given twice, and loops, each told at the first model on it."""
    models = _models(settings, faulty)
    by_alias = {alias: model.name for model in settings.models for alias in model.aliases if alias not in models}
    numbers = {model.name: i for i, model in reversed(list(enumerate(settings.models)))}
    chains = [[by_alias.get(name, name) for name in model.fallbacks] for model in settings.models]
    # With a name missing among those that are known, "unknown" might only mean that its own line is faulty.
    complete = not any(path.endswith(("].name", ".models", ".aliases")) or ".aliases[" in path for path in faulty)
    for i, model in enumerate(settings.models):
        for j, target in enumerate(chains[i]):
            path = _item(f"models[{i}].fallbacks", j, model.fallbacks)
            if path in faulty:
                continue
            if target in chains[i][:j]:
                yield Fault(path, f"{toml_value(target)} is listed twice")
            elif target not in models and complete:
                yield Fault(
                    path,
                    f"expected the name of a model, got {toml_value(model.fallbacks[j])};"
                    " name it in [[models]] or in the models of an endpoint",
                )
            elif (loop := _way_back(i, target, numbers, chains)) is not None:
                names = " -> ".join([model.name, *loop])
                yield Fault(path, f"expected no loop, got {names}")


def _way_back(start: int, target: str, numbers: dict[str, int], chains: list[list[str]]) -> list[str] | None:
    """The shortest chain of fallbacks from `target` back to model number `start`, using no model before `start`, so
    that each loop is told once, where it begins."""
    ways = deque([[target]])
    seen = {target}
    while ways:
        way = ways.popleft()
        number = numbers.get(way[-1], -1)
        if number == start:
            return way
        if number < start:
            continue
        for onward in chains[number]:
            if onward not in seen:
                seen.add(onward)
                ways.append([*way, onward])
    return None


def _models(settings: Settings, faulty: Collection[str]) -> dict[str, str]:
    """Names of models known from the configuration, and where each is first given."""
    known: dict[str, str] = {}
    for i, model in enumerate(settings.models):
        if f"models[{i}].name" not in faulty:
            known.setdefault(model.name, f"models[{i}].name")
    for i, endpoint in enumerate(settings.endpoints):
        for j, name in enumerate(endpoint.models or ()):
            known.setdefault(name, _item(f"endpoints[{i}].models", j, endpoint.models or ()))
    return known


def _item(path: str, index: int, items: Collection[str]) -> str:
    return path if len(items) == 1 else f"{path}[{index}]"


def _bands(settings: Settings, faulty: Collection[str]) -> Iterator[Fault]:
    if not any(path.startswith("admission") for path in faulty):
        yield from bands.faults(settings.admission)


def _ports(settings: Settings, faulty: Collection[str]) -> Iterator[Fault]:
    ports = settings.agent.port_range
    if any(path.startswith("agent.port_range") for path in faulty):
        return
    if len(ports) != 2 or not 1024 <= ports[0] <= ports[1] <= 65535:
        yield Fault(
            "agent.port_range", f"expected the first and the last port, from 1024 to 65535, got {toml_value(ports)}"
        )


def _silences(settings: Settings, faulty: Collection[str]) -> Iterator[Fault]:
    control = settings.control
    if control.lost_after_s <= control.unreachable_after_s and not any(path.startswith("control.") for path in faulty):
        yield Fault(
            "control.lost_after_s",
            f"expected more than unreachable_after_s ({control.unreachable_after_s:g}), got {control.lost_after_s:g}",
        )


def _scaling(settings: Settings, faulty: Collection[str]) -> Iterator[Fault]:
    for i, model in enumerate(settings.models):
        path, scaling = f"models[{i}].scaling", model.scaling
        below = 0 < scaling.max_replicas < scaling.min_replicas
        if below and f"{path}.max_replicas" not in faulty:
            yield Fault(
                f"{path}.max_replicas",
                f"expected at least min_replicas ({scaling.min_replicas}), got {scaling.max_replicas}",
            )
        if scaling.idle_s and scaling.min_replicas and f"{path}.min_replicas" not in faulty:
            yield Fault(f"{path}.idle_s", f"expected min_replicas = 0 too, got min_replicas = {scaling.min_replicas}")


def _profiles(settings: Settings, faulty: Collection[str]) -> Iterator[Fault]:
    if any(model.profiles or model.scaling != Scaling() for model in settings.models):
        from appliance.cli.config import profiles  # only who runs engines pays for their planners

        yield from profiles.faults(settings.models, faulty)


_RULES: tuple[Callable[[Settings, Collection[str]], Iterator[Fault]], ...] = (
    _listeners,
    _socket,
    _tls_pair,
    _buffers,
    _endpoint_ids,
    _model_names,
    _aliases,
    _fallbacks,
    _bands,
    _ports,
    _silences,
    _scaling,
    _profiles,
)
