"""Keeps events of an interest topic for a reader by position; see `wire/interest.py`."""

from __future__ import annotations

import contextlib
import logging

from millstream.errors import (
    MillstreamError,
    RequestTimeout,
    SubscriptionConflict,
    SubscriptionNotFound,
)
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.interest import Hold, needs_hold

__all__ = ["InterestHold", "hold_on"]

_log = logging.getLogger("millstream.messaging")


class InterestHold:
    """The hold of one reader on one stream."""

    def __init__(self, jetstream: JetStream, hold: Hold) -> None:
        self._jetstream = jetstream
        self._hold = hold

    async def open(self, known: bool) -> None:
        """Make sure that it exists; `known`: the reader has been here, so it should."""
        hold, jetstream = self._hold, self._jetstream
        try:
            info = await jetstream.consumer_info(hold.stream, hold.name)
        except SubscriptionNotFound:
            if known:
                _log.warning("%s", hold.gone())
            info = await jetstream.create_consumer(hold.stream, hold.config(), "create")
        hold.found(info)

    async def move(self, position: int) -> None:
        """Let the server drop what is before a stored position.

        Nothing is lost when this fails: more is kept than needed, and the next move makes up.
        """
        request = self._hold.move(position)
        if request is None:
            return
        try:
            try:
                await self._jetstream.ask(request.verb, request.body)
                self._hold.moved(position)
            except RequestTimeout:
                # A consumer that does not exist gives no answer either.
                await self.open(known=True)
        except SubscriptionConflict:
            raise
        except MillstreamError as error:
            self._jetstream.connection.check_open()
            _log.info("%s: its events are not released yet: %s", self._hold.reader, error)

    async def move_back(self, position: int) -> None:
        """Keep what is stored from an earlier position on, before the reader returns to it.

        What it moves over a second time is dropped when the server starts again, not at once: the
        server looks only at what is new since the last move.
        """
        request = self._hold.move_back(position)
        if request is not None:
            await self._jetstream.ask(request.verb, request.body)
            self._hold.moved(position)

    async def delete(self) -> None:
        """Stop keeping events; no-op when there is none."""
        with contextlib.suppress(SubscriptionNotFound):
            await self._jetstream.delete_consumer(self._hold.stream, self._hold.name)


async def hold_on(
    jetstream: JetStream, stream: str, kind: str, name: str, *, known: bool
) -> InterestHold | None:
    """The hold of a reader where the stream needs one, open; None where it does not.

    ConfigError on a work queue. `known`: the reader has been here before.
    """
    config = (await jetstream.stream_info(stream)).config
    if not needs_hold(config, f"{kind} '{name}'"):
        return None
    hold = InterestHold(jetstream, Hold(stream, kind, name))
    await hold.open(known)
    return hold
