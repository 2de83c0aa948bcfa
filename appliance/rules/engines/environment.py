"""The environment of an engine: built, not inherited.

What an engine must not see: the library path and the interpreter's variables of this program (a frozen one carries a
libc of its own, and a child that loads it dies), keys of other engines, and settings that happen to stand in the
agent's environment. What it must see: exactly the chosen devices in a fixed order, and exactly the chosen fabric's
adapters. Left open, NCCL picks any adapter that is up, also one on a fabric where the peer is unreachable, and the job
hangs instead of failing.
"""

from __future__ import annotations

from collections.abc import Mapping

from appliance.facts.hardware import Fabric
from appliance.facts.replica import Shard
from appliance.rules.engines.engine import MARKER, Site

INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"),
        *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"),
    }
)
"""What is passed on: where things are and how the network is reached. Settings of an engine go into `profile.env`."""

OWNED = (
    MARKER,
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_DISABLE",
    "LD_PRELOAD_ORIG",
    "LD_LIBRARY_PATH_ORIG",
)
"""Variables a profile may not set: placement decides them, or they belong to this program."""


def build(shard: Shard, site: Site, program: str, own: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of one process that runs `program` (an absolute path). `own` is what its engine needs."""
    env = inherited(site.environment, site.bundle)
    env["PATH"] = _with_folder(env.get("PATH") or "/usr/local/bin:/usr/bin:/bin", program.rpartition("/")[0])
    env |= _socket_interface(shard, site)
    env |= shard.profile.env
    env |= own
    env |= devices(shard, site)
    env |= adapters(shard, site)
    env[MARKER] = site.marker
    return env


def inherited(environment: Mapping[str, str], bundle: str) -> dict[str, str]:
    """What of the agent's own environment an engine gets; nothing in it leads into `bundle`.

    A frozen program keeps the library path it was started with as `LD_LIBRARY_PATH_ORIG`: that one is given back.
    """
    env = {name: text for name, text in environment.items() if name in INHERITED or name.startswith("LC_")}
    if "LD_LIBRARY_PATH_ORIG" in environment:
        env["LD_LIBRARY_PATH"] = environment["LD_LIBRARY_PATH_ORIG"]
    if bundle:
        env = {name: _outside(text, bundle.rstrip("/")) for name, text in env.items()}
    # An empty entry of a search path means the current folder, an empty certificate file none at all.
    return {name: text for name, text in env.items() if text}


def devices(shard: Shard, site: Site) -> dict[str, str]:
    """The chosen GPUs by number, in PCI order, which is the order their numbers were found in.

    Numbers and not UUIDs, because engines have taken this variable apart as numbers for years. A shard on CPUs sees
    none, or its engine would take the first that it finds.
    """
    found = [site.inventory.gpu(uuid) for uuid in shard.gpus]
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(str(gpu.index) for gpu in found if gpu is not None),
    }


def adapters(shard: Shard, site: Site) -> dict[str, str]:
    """The RDMA adapters NCCL may use: exactly those of the shard's fabric, or none at all. Nothing on a single node."""
    if shard.profile.nodes < 2:
        return {}
    fabric = site.inventory.fabric(shard.fabric)
    if fabric is None:
        return {"NCCL_IB_DISABLE": "1"}
    env = {"NCCL_IB_HCA": ib_hca(fabric)}
    if fabric.gid_index is not None:
        # Only with a value: NCCL reads an empty one as 0, which is a link-local address.
        env["NCCL_IB_GID_INDEX"] = str(fabric.gid_index)
    return env


def ib_hca(fabric: Fabric) -> str:
    """The fabric's adapters for NCCL. Without the leading `=` each name would match as a prefix, and `mlx5_1` would
    take `mlx5_10` along; the port is named only where the adapter has several."""
    names = [rail.adapter if rail.only_port else f"{rail.adapter}:{rail.port}" for rail in fabric.rails]
    return "=" + ",".join(names)


def _socket_interface(shard: Shard, site: Site) -> dict[str, str]:
    """The interface that carries the cluster address, for the connections that are not RDMA."""
    name = site.inventory.interface_of(shard.address) if shard.profile.nodes > 1 else ""
    # Gloo wants the bare name, NCCL the `=` for the same reason as above.
    return {"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name} if name else {}


def _with_folder(path: str, folder: str) -> str:
    """The program's own folder first: engines call `ninja` and others that were installed beside them."""
    return path if not folder or folder in path.split(":") else f"{folder}:{path}"


def _outside(text: str, bundle: str) -> str:
    return ":".join(part for part in text.split(":") if part != bundle and not part.startswith(bundle + "/"))
