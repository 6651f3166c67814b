"""Calls of the JetStream API over a connection, with short attempts and bounded retries."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from millstream.deadline import Deadline
from millstream.errors import ApiError, ConnectError, NoResponders, RequestTimeout
from millstream.wire import listing
from millstream.wire.aio.connection import Connection
from millstream.wire.api import (
    RETRY,
    ConsumerConfig,
    ConsumerInfo,
    ErrorCode,
    Refusal,
    StreamInfo,
    api_prefix,
    consumer_request,
    error_from,
)
from millstream.wire.listing import NAMES_PAGES_MAX, Listing, NamesPage, Page
from millstream.wire.message import StoredMessage

__all__ = ["JetStream"]

_NO_MAJORITY: Final = (
    ". A cluster answers while most of its nodes are connected: check them with 'millstream status'"
)

T = TypeVar("T")
Row = TypeVar("Row")

# A request during an election is dropped in silence, so an attempt waits only this long.
ATTEMPT_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = 0.1


class _Purged(msgspec.Struct):
    purged: int = 0


class _Got(msgspec.Struct):
    message: dict[str, Any]


class _Answer(msgspec.Struct):
    error: Refusal | None = None


_Attempt = asyncio.Future[tuple[bytes, bytes]]


def _answer(attempt: _Attempt, gone: int | None, verb: str) -> bytes:
    """The answer to an attempt; a refusal is raised unless its error is `gone`."""
    _, answer = attempt.result()
    refusal = msgspec.json.decode(answer, type=_Answer).error
    if refusal is None or refusal.err_code == gone:
        return answer
    raise error_from(refusal, verb)


class JetStream:
    """The JetStream API; every call is safe to repeat and is repeated until it is answered."""

    def __init__(self, connection: Connection, domain: str | None = None) -> None:
        self.connection = connection
        self.domain = domain or connection.settings.domain
        self.prefix = api_prefix(self.domain)

    async def call(self, verb: str, body: object, into: type[T], timeout: float | None = None) -> T:
        """Ask and give the typed answer; a refusal is raised as an ApiError."""
        return msgspec.json.decode(await self.ask(verb, body, timeout), type=into)

    async def ask(
        self,
        verb: str,
        body: object = None,
        timeout: float | None = None,
        gone: int | None = None,
    ) -> bytes:
        """Ask and give the raw answer; of several attempts the first that is answered counts.

        `gone` is the error that a repeated delete gets when the first one worked unanswered.
        """
        connection = self.connection
        subject = f"{self.prefix}.{verb}"
        payload = b"" if body is None else msgspec.json.encode(body)
        deadline = Deadline(connection.settings.request_timeout if timeout is None else timeout)
        waiting: list[_Attempt] = []  # attempts without an answer
        first: _Attempt | None = None
        try:
            while True:
                await connection.wait_connected(deadline)
                attempt = connection.ask(subject, payload, asks_again=True)
                first = first or attempt
                waiting.append(attempt)
                patience = deadline.left(at_most=ATTEMPT_SECONDS)
                await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                error: Exception = RequestTimeout(subject, deadline.seconds, _NO_MAJORITY)
                answered = [attempt for attempt in waiting if attempt.done()]
                for attempt in answered:
                    waiting.remove(attempt)
                    try:
                        return _answer(attempt, None if attempt is first else gone, verb)
                    except ApiError as refused:
                        if refused.err_code not in RETRY:
                            raise
                        error = refused
                    except (NoResponders, ConnectError) as failed:
                        connection.check_open()
                        error = failed
                if deadline.passed:
                    raise error
                if answered:
                    await asyncio.sleep(deadline.left(at_most=PAUSE_SECONDS))
        finally:
            for attempt in waiting:
                attempt.cancel()

    # -- streams --------------------------------------------------------------------------

    async def stream_info(self, name: str, timeout: float | None = None) -> StreamInfo:
        return await self.call(f"STREAM.INFO.{name}", None, StreamInfo, timeout)

    async def create_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        return await self.call(f"STREAM.CREATE.{config['name']}", config, StreamInfo)

    async def update_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        return await self.call(f"STREAM.UPDATE.{config['name']}", config, StreamInfo)

    async def delete_stream(self, name: str) -> None:
        await self.ask(f"STREAM.DELETE.{name}", gone=ErrorCode.STREAM_NOT_FOUND)

    async def purge_stream(self, name: str, request: Mapping[str, Any] | None = None) -> int:
        """Remove messages (all, or by `filter`, `seq`, `keep`); how many that were."""
        answer = await self.call(f"STREAM.PURGE.{name}", request or {}, _Purged)
        return answer.purged

    async def streams(self) -> list[StreamInfo]:
        """All streams of the account, with their state. IncompleteList: some are unreachable."""
        return await self._list(listing.streams())

    async def stream_names(self, timeout: float) -> list[str]:
        """The names of the streams, at most some thousands, for messages of errors."""
        deadline, names = Deadline(timeout), list[str]()
        for _ in range(NAMES_PAGES_MAX):
            body = {"offset": len(names)}
            page = await self.call("STREAM.NAMES", body, NamesPage, deadline.left())
            names += page.streams or ()
            if not page.streams or len(names) >= page.total:
                break
        return names

    async def stream_configs(self, subject: str | None = None) -> list[dict[str, Any]]:
        """The configurations of all streams, or of those that take the given subject.

        Those of streams whose nodes are down are known too.
        """
        found = await self._list(listing.streams(subject, states=False))
        return [info.config for info in found]

    async def _list(self, wanted: Listing[Row]) -> list[Row]:
        """Every row of a list; each page may take as long as a request may."""
        seconds = self.connection.settings.request_timeout
        deadline = Deadline(seconds)
        while not wanted.complete:
            try:
                page = await self.call(wanted.verb, wanted.request, Page, deadline.left())
            except RequestTimeout as error:
                raise (wanted.incomplete(seconds) if wanted.short else error) from error
            if wanted.take(page):
                deadline = Deadline(seconds)
            elif deadline.passed:
                raise wanted.incomplete(seconds)
            else:
                await asyncio.sleep(deadline.left(at_most=PAUSE_SECONDS))
        return wanted.rows

    async def delete_message(self, stream: str, sequence: int, erase: bool = False) -> None:
        body = {"seq": sequence, "no_erase": not erase}
        await self.ask(f"STREAM.MSG.DELETE.{stream}", body, gone=ErrorCode.DELETE_FAILED)

    # -- consumers ------------------------------------------------------------------------

    async def consumer_info(self, stream: str, name: str) -> ConsumerInfo:
        return await self.call(f"CONSUMER.INFO.{stream}.{name}", None, ConsumerInfo)

    async def create_consumer(
        self,
        stream: str,
        config: ConsumerConfig,
        action: str = "",
        timeout: float | None = None,
    ) -> ConsumerInfo:
        """Create (`action` "create"), change ("update") or either ("") a consumer."""
        verb, body = consumer_request(stream, config, action)
        return await self.call(verb, body, ConsumerInfo, timeout)

    async def delete_consumer(self, stream: str, name: str) -> None:
        verb = f"CONSUMER.DELETE.{stream}.{name}"
        await self.ask(verb, gone=ErrorCode.CONSUMER_NOT_FOUND)

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        """All consumers of a stream. IncompleteList: some are unreachable."""
        return await self._list(listing.consumers(stream))

    # -- single messages ------------------------------------------------------------------

    async def get_message(self, stream: str, ask: Mapping[str, Any]) -> StoredMessage | None:
        """One message by `seq`, `last_by_subj` or `seq` + `next_by_subj`; None: there is none."""
        try:
            answer = await self.call(f"STREAM.MSG.GET.{stream}", ask, _Got)
        except ApiError as error:
            if error.err_code == ErrorCode.MESSAGE_NOT_FOUND:
                return None
            raise
        found = answer.message
        return StoredMessage(
            found["subject"],
            found["seq"],
            base64.b64decode(found.get("hdrs", "")),
            base64.b64decode(found.get("data", "")),
            found["time"],
        )

    async def sequence_at(self, stream: str, time: str) -> int:
        """The first sequence stored at or after a time (RFC 3339), or the one to come."""
        state = (await self.stream_info(stream)).state
        found = await self.get_message(stream, {"start_time": time, "next_by_subj": ">"})
        return state.last_seq + 1 if found is None else found.sequence
