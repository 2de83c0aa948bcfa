"""Words of an agent that a control plane does not understand, and faults of one link."""

from __future__ import annotations

import pytest
import structlog.testing
import trio
import trio.testing

from appliance.facts import link as say
from appliance.facts.link import Refused, Start, Trouble, Welcome
from appliance.wire.link import LinkClosed, UnknownMessage
from tests.control_scene import control, next_of, register, shard

Clock = trio.testing.MockClock


class Mumbling:
    """A link whose `receive` raises what a test wants, after the registration."""

    peer = "10.0.0.9:1"

    def __init__(self, raises: list[Exception]) -> None:
        self.raises = raises
        self.sent: list[say.Message] = []
        self.said = False
        self.reason: str | None = None

    async def send(self, message: say.Message) -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append(message)

    async def receive(self) -> say.Message:
        await trio.lowlevel.checkpoint()
        if not self.said:
            self.said = True
            return register()
        if self.raises:
            raise self.raises.pop(0)
        await trio.sleep_forever()

    async def aclose(self, reason: str = "") -> None:
        self.reason = reason


async def test_a_message_of_a_later_version_is_answered_and_the_link_goes_on(autojump_clock: Clock) -> None:
    async with control() as scene:
        link = Mumbling([UnknownMessage("there is no message of the type 'dance'")] * 100)
        scene.nursery.start_soon(scene.plane.attend, link)
        await scene.pass_over()
        assert "node-a" in scene.plane.sessions
        answers = [each for each in link.sent if isinstance(each, Trouble)]
        assert answers[0] == Trouble("there is no message of the type 'dance'") and len(answers) == 20


async def test_what_is_no_message_ends_the_link_and_is_named(autojump_clock: Clock) -> None:
    from appliance.wire.link import Malformed

    async with control() as scene:
        link = Mumbling([Malformed("not a message of the link: it is broken")])
        scene.nursery.start_soon(scene.plane.attend, link)
        await scene.pass_over()
        assert not scene.plane.sessions
        last = link.sent[-1]
        assert (
            isinstance(last, Refused) and last.code == "malformed" and "node-a has sent not a message" in last.message
        )


async def test_a_second_registration_and_words_of_a_control_plane_are_answered(autojump_clock: Clock) -> None:
    async with control() as scene:
        link = await scene.join()
        for message in (register(), Welcome(1, "1.0", 1.0, 1.0, 1.0)):
            await link.send(message)
            assert isinstance(await next_of(link, Trouble), Trouble)
        assert scene.plane.world.nodes["node-a"].session == 1


async def test_a_fault_in_one_link_reaches_no_other(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with control() as scene:
        healthy = await scene.join(register("node-b"))
        link = await scene.join()

        def broken(*_: object) -> None:
            raise RuntimeError("a fault")

        with structlog.testing.capture_logs() as lines:
            monkeypatch.setattr(scene.plane.world, "looked", broken)
            await link.send(say.Look(register().inventory))
            with pytest.raises(LinkClosed):
                await next_of(link, Start)
        assert [each["event"] for each in lines if each["log_level"] == "error"] == ["fault of a link"]
        assert set(scene.plane.sessions) == {"node-b"}
        scene.plane.sessions["node-b"].say(Start(shard()))
        assert await next_of(healthy, Start)
