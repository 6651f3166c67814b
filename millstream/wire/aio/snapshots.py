"""The server's own copies of a stream: take one while it is used, and restore a stream from one.

A copy is what `wire/archive.py` describes. It is sent in chunks with acks, so neither side holds
more than a window of it in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import msgspec

from millstream.errors import BackupError, ConnectError
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.pull_consumer import Signal
from millstream.wire.api import Refusal, StreamInfo, StreamState, error_from
from millstream.wire.protocol import status_of, unique_token

__all__ = ["StreamCopy", "StreamSnapshot", "restore_stream"]

CHUNK_BYTES: Final = 256 * 1024
WINDOW_BYTES: Final = 4 * 1024 * 1024
WINDOW_CHUNKS: Final = WINDOW_BYTES // CHUNK_BYTES
# Without progress both sides give up on a transfer; the server does so after 5 s.
SILENCE_SECONDS: Final = 30.0
# The server answers the last chunk when the stream is usable, on a cluster with all its replicas.
FINISH_SECONDS: Final = 300.0


class StreamSnapshot(msgspec.Struct):
    """What a copy holds: the stream's configuration and its state when the copy began."""

    config: dict[str, Any] = {}
    state: StreamState = StreamState()
    error: Refusal | None = None


class _RestoreAnswer(msgspec.Struct):
    deliver_subject: str = ""
    error: Refusal | None = None


class _Restored(StreamInfo, frozen=True):
    error: Refusal | None = None


class StreamCopy:
    """One copy under way: `begin`, then iterate over its parts; always `close`."""

    def __init__(self, jetstream: JetStream, stream: str) -> None:
        self._jetstream, self._stream = jetstream, stream
        self._connection: Connection = jetstream.connection
        self._signal = Signal()
        self._chunks: list[tuple[bytes, bytes]] = []  # payload and address of its ack
        self._end: tuple[int, str] | None = None  # the status that ended it
        self._lost = False
        self._subject = f"{self._connection.settings.inbox_prefix}.{unique_token()}"
        self._interest = self._connection.subscribe(self._subject, self._take)
        self._connection.on_disconnected.append(self._disconnected)

    def _take(self, _subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if payload:
            self._chunks.append((payload, reply))
        else:
            self._end = status_of(headers)
        self._signal.set()

    def _disconnected(self) -> None:
        self._lost = True
        self._signal.set()

    def close(self) -> None:
        """Take nothing more; the server then ends it, too."""
        self._connection.unsubscribe(self._interest)
        if self._disconnected in self._connection.on_disconnected:
            self._connection.on_disconnected.remove(self._disconnected)

    async def begin(self, consumers: bool = True) -> StreamSnapshot:
        """Have the server send it. Asked once: a second request would send it twice."""
        body = {
            "deliver_subject": self._subject,
            "chunk_size": CHUNK_BYTES,
            "window_size": WINDOW_BYTES,
            "no_consumers": not consumers,
        }
        verb = f"{self._jetstream.prefix}.STREAM.SNAPSHOT.{self._stream}"
        _, answer = await self._connection.request(verb, msgspec.json.encode(body), asks_again=True)
        found = msgspec.json.decode(answer, type=StreamSnapshot)
        if found.error is not None:
            raise error_from(found.error)
        return found

    async def parts(self) -> AsyncIterator[bytes]:
        """The bytes of it; what is not taken yet is not acked, so the server waits."""
        number = 0
        while True:
            while self._chunks:
                taken, self._chunks = self._chunks, []
                for _, reply in taken:
                    number += 1
                    if reply and int(reply.rpartition(b".")[2]) != number:
                        raise ConnectError(
                            f"chunk {number} of the copy of '{self._stream}' is lost"
                        )
                yield b"".join(payload for payload, _ in taken)
                for _, reply in taken:
                    if reply:
                        self._connection.publish(reply, b"")
            if self._end is not None:
                break
            if self._lost:
                raise ConnectError(f"the connection was lost while '{self._stream}' was copied")
            if not await self._signal.wait(SILENCE_SECONDS):
                raise ConnectError(
                    f"the server sent nothing of '{self._stream}' for {SILENCE_SECONDS:g} s"
                )
        code, text = self._end
        if code not in (0, 204):
            raise ConnectError(f"the server ended the copy of '{self._stream}': {code} {text}")


async def restore_stream(
    jetstream: JetStream,
    snapshot: StreamSnapshot,
    content: Iterator[bytes],
    sent: Callable[[int], None],
) -> StreamInfo:
    """Create a stream from a copy; `sent` is called with the bytes of each part that was sent.

    If it fails after the server has accepted it, a part of the stream may exist.
    """
    connection = jetstream.connection
    name = snapshot.config["name"]
    verb = f"{jetstream.prefix}.STREAM.RESTORE.{name}"
    body = {"config": snapshot.config, "state": snapshot.state}
    _, answer = await connection.request(verb, msgspec.json.encode(body), asks_again=True)
    accepted = msgspec.json.decode(answer, type=_RestoreAnswer)
    if accepted.error is not None:
        raise error_from(accepted.error)
    upload = _Upload(connection, accepted.deliver_subject, name)
    try:
        async for part in _chunked(content, min(CHUNK_BYTES, connection.info.max_payload)):
            await upload.send(part)
            sent(len(part))
        return await upload.finish()
    except BaseException:
        upload.abort()
        raise


async def _chunked(content: Iterator[bytes], size: int) -> AsyncIterator[bytes]:
    while (part := await asyncio.to_thread(next, content, None)) is not None:
        for at in range(0, len(part), size):
            yield part[at : at + size]


class _Upload:
    """The chunks of a restore: a window of them is on its way, each is answered."""

    def __init__(self, connection: Connection, subject: str, stream: str) -> None:
        self._connection, self._subject, self._stream = connection, subject, stream
        self._asked: list[asyncio.Future[tuple[bytes, bytes]]] = []

    async def send(self, part: bytes) -> None:
        self._asked.append(self._connection.ask(self._subject, part, asks_again=True))
        if len(self._asked) >= WINDOW_CHUNKS:
            await self._answered()

    async def _answered(self) -> None:
        """Wait for the answer to the oldest chunk; only a refusal has a text."""
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                _, answer = await self._asked.pop(0)
        except TimeoutError as error:
            raise ConnectError(
                f"the server took nothing of '{self._stream}' for {SILENCE_SECONDS:g} s"
            ) from error
        if answer:
            self._restored(answer)

    async def finish(self) -> StreamInfo:
        while self._asked:
            await self._answered()
        _, answer = await self._connection.request(
            self._subject, timeout=FINISH_SECONDS, asks_again=True
        )
        return self._restored(answer)

    def _restored(self, answer: bytes) -> StreamInfo:
        found = msgspec.json.decode(answer, type=_Restored)
        if found.error is not None:
            if "name already in use" in found.error.description:  # created since it was accepted
                raise error_from(found.error)
            raise BackupError(f"the server refused '{self._stream}': {found.error.description}")
        return found

    def abort(self) -> None:
        """Have the server end it now: what it has so far is not complete."""
        for future in self._asked:
            future.cancel()
        if self._connection.connected:
            self._connection.publish(self._subject.encode(), b"", b"_INBOX.nobody")
