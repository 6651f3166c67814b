"""An atomic batch whose answer was lost, with expectations about the last message of subjects."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import millstream
from millstream.errors import Unconfirmed, WrongSequence
from millstream.mill import Mill
from millstream.wire.aio import atomic
from millstream.wire.aio.atomic import publish_batch
from millstream.wire.message import OutgoingMessage
from tests.integration.wire.frame_proxy import FrameProxy, frame_proxy


def after(subject: str, last: int) -> OutgoingMessage:
    """A message without an id, as after a restart of the broker, which forgets ids."""
    block = f"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: {last}\r\n\r\n"
    return OutgoingMessage(subject.encode(), block.encode(), b"x")


def is_answer(frame: bytes) -> bool:
    return b'"stream":"s"' in frame and b'"seq":' in frame and b'"config"' not in frame


class Rules:
    """Drops the first answer to a batch, and what a search of the log needs while `blind`."""

    def __init__(self, proxy: FrameProxy, blind: int) -> None:
        self.answers, self.blind = 0, blind
        proxy.to_client, proxy.to_server = self.to_client, self.to_server

    def to_client(self, frame: bytes) -> bool:
        self.answers += is_answer(frame)
        return not (is_answer(frame) and self.answers == 1)

    def to_server(self, frame: bytes) -> bool:
        searching = b"STREAM.INFO.s" in frame
        return not (searching and self.answers <= self.blind)


@pytest.fixture
async def through(
    millstream_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[FrameProxy, Mill]]:
    monkeypatch.setattr(atomic, "ATTEMPT_SECONDS", 0.5)
    async with (
        frame_proxy(millstream_url) as (proxy, url),
        millstream.connect(url, request_timeout=0.5) as mill,
    ):
        config = {"name": "s", "subjects": ["s.>"], "allow_atomic": True}
        await mill.jetstream.create_stream(config)
        yield proxy, mill


async def test_a_batch_that_was_stored_is_no_conflict_with_itself(
    through: tuple[FrameProxy, Mill],
) -> None:
    proxy, mill = through
    rules = Rules(proxy, blind=1)  # the log can be searched only after the second attempt
    ack = await publish_batch(mill.jetstream, "s", [after("s.a", 0), after("s.b", 0)], 30)
    assert rules.answers >= 2  # the second attempt was refused
    assert ack.seq == 2
    assert (await mill.jetstream.stream_info("s")).state.last_seq == 2


async def test_a_batch_that_lost_to_another_is_a_conflict(
    through: tuple[FrameProxy, Mill],
) -> None:
    proxy, mill = through
    await publish_batch(mill.jetstream, "s", [after("s.a", 0), after("s.b", 0)], 30)
    Rules(proxy, blind=0)
    with pytest.raises(WrongSequence):
        await publish_batch(mill.jetstream, "s", [after("s.c", 0), after("s.b", 0)], 30)
    assert (await mill.jetstream.stream_info("s")).state.last_seq == 2


async def test_a_refusal_that_cannot_be_checked_is_not_called_a_conflict(
    through: tuple[FrameProxy, Mill],
) -> None:
    proxy, mill = through
    rules = Rules(proxy, blind=1_000)
    with pytest.raises(Unconfirmed, match="could not be searched"):
        await publish_batch(mill.jetstream, "s", [after("s.a", 0), after("s.b", 0)], 2)
    rules.blind = 0
    assert (await mill.jetstream.stream_info("s")).state.last_seq == 2
