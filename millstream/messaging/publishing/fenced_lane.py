"""One fence of a writer, on one partition: claimed, then one unit after the other.

`FenceWriter` decides; this asks the broker for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, TypeVar
from uuid import uuid4

from millstream.errors import MillstreamError
from millstream.events.fence import FenceState
from millstream.events.fence_writer import Answer, FenceWriter, ReadLast, Request, Steps
from millstream.events.packs.pack import EncodedPack
from millstream.events.positions import Position
from millstream.messaging.publishing.acks import Acks
from millstream.wire.aio.atomic import publish_batch
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.message import OutgoingMessage

__all__ = ["FencedLane"]

STORE_SECONDS: Final = 30.0

T = TypeVar("T")


class FencedLane:
    """Stores units under one fence. A unit that is stored is never stored again, by anybody."""

    def __init__(
        self,
        jetstream: JetStream,
        publisher: StreamPublisher,
        stream: str,
        subject: str,
        writer: str,
        acks: Acks | None = None,
    ) -> None:
        self._jetstream = jetstream
        self._publisher = publisher
        self._stream = stream
        self._fence = FenceWriter(subject, writer)
        self._acks = acks

    @property
    def state(self) -> FenceState:
        """After the last unit that was stored."""
        return self._fence.state

    async def claim(self, input_stream: str = "") -> FenceState:
        """Take the writer's name over; every older writer of it is fenced out from now on.

        A process names the stream it reads, so that it can be found with its position.
        """
        return await self._run(self._fence.claim(uuid4().hex, input_stream))

    async def store(
        self,
        packs: Sequence[EncodedPack],
        position: Position,
        note: str | None = None,
        noted: Position | None = None,
        beside: Sequence[OutgoingMessage] = (),
    ) -> FenceState:
        """Store packs and plain messages `beside` them, all or none, and with them the position."""
        steps = self._fence.store(packs, position, note, noted, beside)
        if self._acks is None:
            return await self._run(steps)
        await self._acks.check()
        state = await self._run(steps)
        await self._acks.check()  # the server may be another one by now
        return state

    async def look(self) -> FenceState:
        """The state in the last unit on the fence, whoever stored it."""
        return await self._run(self._fence.look())

    async def _run(self, steps: Steps[T], turn: asyncio.Future[None] | None = None) -> T:
        """Ask what the steps want to know; they get no answer before it is their turn."""
        try:
            request = next(steps)
            while True:
                try:
                    answer = await self._ask(request)
                except MillstreamError as error:
                    await _done(turn)
                    request = steps.throw(error)
                else:
                    await _done(turn)
                    request = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _ask(self, request: Request) -> Answer:
        if isinstance(request, ReadLast):
            ask = {"last_by_subj": request.subject}
            return await self._jetstream.get_message(self._stream, ask)
        messages = request.messages
        if len(messages) == 1:
            return await self._publisher.publish(messages[0], STORE_SECONDS, lambda ack: ack)
        return await publish_batch(self._jetstream, self._stream, messages, STORE_SECONDS)


async def _done(turn: asyncio.Future[None] | None) -> None:
    if turn is not None:
        await asyncio.shield(turn)
