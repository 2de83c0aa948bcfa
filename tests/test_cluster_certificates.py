"""A cluster of real processes, and agents that may not come in: both sides say why, with certificate and claim."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from appliance.control import pki
from appliance.store.papers import Papers, make_folder, put
from appliance.wire import certificates
from tests.cluster import Cluster, Place, cluster, inventory, sim_model

DAY_S = 86400.0


def authority_of(place: Place) -> pki.Authority:
    return pki.load(Papers.of(str(place.state)), time.time())


def give(place: Place, authority: pki.Authority, name: str, now: float, root: bytes | None = None) -> str:
    """Put a certificate of `name` into a machine's folder as if it had joined; its serial."""
    papers = Papers.of(str(place.state))
    make_folder(papers.folder)
    key = certificates.new_key()
    signed = authority.sign_csr(certificates.signing_request(key, name), name, now)
    put(papers.node_key, key)
    put(papers.node, signed.pem.encode())
    put(papers.root, root or authority.pem)
    return signed.row.serial


def machine(made: Cluster, node: str) -> Place:
    """A machine that will call as `node`."""
    place = made.nodes[node] = Place(made.folder, f"machine-{node}")
    hardware = place.folder / "inventory.json"
    hardware.write_text(json.dumps({**inventory(node, 1), "address": "127.0.0.1"}))
    place.config.write_text(
        f'[agent]\nnode = "{node}"\naddress = "127.0.0.1"\nlisten = "127.0.0.1:0"\ninventory_file = "{hardware}"\n'
        f'control_url = "wss://{made.host}:{made.link_port}"\n'
    )
    return place


def stranger(folder: Path) -> pki.Authority:
    """The root of another cluster, of the same subject."""
    authority = pki.create(Papers.of(str(folder / "stranger")), time.time())
    authority.keep_server(["box"], time.time())
    return authority


async def test_who_may_not_come_in_is_told_why_on_both_sides(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(sim_model())
        await made.begin()
        ours, theirs, now = authority_of(made.control), stranger(tmp_path), time.time()
        line = (await made.control.run("ctl", "node", "add", "revoked")).split()[1:]
        await machine(made, "revoked").run(*line)
        await made.control.run("ctl", "node", "revoke", "revoked")
        serials = {
            "wrong": give(machine(made, "wrong"), ours, "right", now),
            "unknown": give(machine(made, "unknown"), ours, "unknown", now),
            "expired": give(machine(made, "expired"), ours, "expired", now - 100 * DAY_S),
            "foreign": give(machine(made, "foreign"), theirs, "foreign", now, root=ours.pem),
            "elsewhere": give(machine(made, "elsewhere"), theirs, "elsewhere", now),
        }
        serve = made.control.process
        assert serve is not None
        for node in made.nodes:
            made.nodes[node].begin("agent")
        agents = {node: place.process for node, place in made.nodes.items() if place.process is not None}

        said = {node: await process.logged("next_step=") for node, process in agents.items()}
        for node, line_ in said.items():
            assert f"claim={node} " in line_ and "certificate=" in line_, line_
        for node, serial in serials.items():
            assert serial in said[node], said[node]
        for node, words in {
            "wrong": ("code=wrong_name", "certificate says right, agent claims wrong"),
            "revoked": ("code=revoked", "this certificate was revoked"),
            "unknown": ("code=unknown", "did not give out that certificate, or has forgotten it"),
            "expired": ("expired",),
            "foreign": ("was not signed by its root|not of our key, or of another root",),
            "elsewhere": ("was not signed by this cluster's root|its signature is wrong",),
        }.items():
            for word in words:
                assert re.search(word, said[node]), said[node]
        for told in (
            "certificate says right, agent claims wrong",
            "agent claims revoked; this certificate was revoked",
            f"certificate says unknown (serial {serials['unknown']}), agent claims unknown; this control plane",
        ):
            assert "peer=127.0.0.1" in await serve.logged(told)
        # of those whom TLS turns away the control plane knows no name: it names the address and the reason
        assert "peer=127.0.0.1" in await serve.logged("TLS handshake failed")
        await serve.logged("it has expired, or the clock of one of the two machines is off")

        assert await made.ask("/nodes") == []
        for process in agents.values():
            assert process.alive
            assert await process.stop() == 0


async def test_a_control_plane_made_anew_takes_its_nodes_back_after_they_join_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(sim_model())
        await made.begin()
        place = await made.add("node-a", inventory("node-a", 1))
        await made.ready("m")
        assert made.control.process is not None and place.process is not None
        engines = place.engines()
        await made.control.process.stop()
        made.control.state.rename(tmp_path / "lost")
        await made.begin()
        line = (await made.control.run("ctl", "node", "add", "node-a")).split()[1:]
        assert "this machine has joined already as node-a" in await place.run(*line, status=1)
        await place.run(*line, "--replace")
        await place.process.stop()  # it would call again by itself, after the pause it makes between refusals
        await made.start("node-a")
        await made.come(
            lambda: made.ask("/nodes"), lambda found: [each["state"] for each in found] == ["ready"], "it is back"
        )
        (replica,) = await made.ready("m")
        assert replica["adopted"]
        assert place.engines() == engines
        node = json.loads(await made.control.run("ctl", "node", "list", "--json"))["nodes"][0]
        assert (node["name"], node["state"]) == ("node-a", "joined")
