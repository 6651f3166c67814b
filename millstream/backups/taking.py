"""Take a backup of topics, or of a whole account, while it is used.

Streams are copied one after the other, so they are not one moment. What makes the restored whole
safe for readers is recorded around the copies:

1. How far every reader is, before anything is copied: subscriptions and groups are restored to
   that. What they handled later is delivered to them again.
2. Work queues, then all other streams, then the schemas: an event that a reader moved from a
   queue to a topic is in one of them at least, and no event lacks its schema.
3. Where every log ends, after everything is copied: a restored log continues after that. No
   position that anybody stored meanwhile can then be ahead of it, and no offset means two events.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from millstream.backups.manifest import (
    FORMAT,
    Draft,
    GroupRecord,
    Manifest,
    Progress,
    Readers,
    StreamBackup,
    sha256_of,
)
from millstream.deadline import now_ns
from millstream.errors import (
    BackupError,
    ConnectError,
    MillstreamError,
    RequestTimeout,
    TopicNotFound,
)
from millstream.messaging.dead_letters.store import default_dead_letter_topic
from millstream.messaging.groups.store import RECORDS, GroupStore, groups_of
from millstream.messaging.subscriptions.settings import settings_of
from millstream.messaging.topics.lookup import side_by_side, streams_of
from millstream.messaging.topics.stream_config import identity_of, wire_format_of
from millstream.mill import Mill
from millstream.settings import SCHEMAS_TOPIC
from millstream.version import __version__
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.ordered_consumer import OrderedConsumer
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.aio.snapshots import StreamCopy, StreamSnapshot
from millstream.wire.api import ConsumerInfo, StreamInfo, parse_ack_address
from millstream.wire.archive import ArchiveEntry, Ending, MessageDigest
from millstream.wire.message import RawMessage
from millstream.wire.range_cursor import Range

__all__ = ["back_up", "present_time", "writing"]

# A copy ends if either side is held up for seconds; then it starts again.
TRIES: Final = 3
PAUSE_SECONDS: Final = 0.5
TAIL_BATCH: Final = 1000
TAIL_SECONDS: Final = 60.0


async def back_up(mill: Mill, folder: Path, topics: Sequence[str], progress: Progress) -> Manifest:
    """Write a backup of the topics, or without any of the whole account, to a new folder."""
    async with writing(folder) as draft:
        manifest = await _Backup(mill, draft.path, progress).take(topics)
        await asyncio.to_thread(draft.finish, manifest)
    return manifest


@asynccontextmanager
async def writing(folder: Path) -> AsyncIterator[Draft]:
    """A new backup; nothing is left of it unless it was finished."""
    draft = Draft(await asyncio.to_thread(folder.absolute))
    try:
        try:
            await asyncio.to_thread(draft.begin)
            yield draft
        finally:
            await asyncio.shield(asyncio.to_thread(draft.remove))
    except MillstreamError:  # some are an OSError, too
        raise
    except OSError as error:
        raise BackupError(
            f"cannot write the backup to {folder}: {error.strerror or error}. Nothing is left of "
            f"it; choose a folder that you may write to, on a disk with enough space"
        ) from error


class _Backup:
    def __init__(self, mill: Mill, path: Path, progress: Progress) -> None:
        self._mill, self._path, self._progress = mill, path, progress
        self._jetstream: JetStream = mill.jetstream
        self._done = self._total = 0

    async def take(self, topics: Sequence[str]) -> Manifest:
        began = present_time()
        infos = await self._chosen(topics)
        names = sorted({identity_of(info.config).topic for info in infos})
        readers = await self._readers(infos)
        groups = await self._groups(names)
        self._total = sum(info.state.bytes for info in infos)
        copies = [await self._copy(info) for info in sorted(infos, key=_order)]
        ends = {str(info.config["name"]): info.state for info in await self._jetstream.streams()}
        streams = [
            msgspec.structs.replace(
                copy,
                end=max(copy.end, ends[copy.name].last_seq if copy.name in ends else 0),
                readers=readers[copy.name],
            )
            for copy in copies
            if copy is not None
        ]
        return Manifest(
            format=FORMAT,
            millstream=__version__,
            server=self._jetstream.connection.info.version,
            began=began,
            finished=present_time(),
            account=await self._account(),
            whole=not topics,
            topics=sorted(topics),
            streams=streams,
            groups=groups,
            schemas=await self._schemas(names),
        )

    # -- what belongs to it ---------------------------------------------------------------

    async def _chosen(self, topics: Sequence[str]) -> list[StreamInfo]:
        """The streams to copy: those of the topics with their dead letters, or all."""
        if not topics:
            return await self._jetstream.streams()
        found: dict[str, StreamInfo] = {}
        for topic in topics:
            streams = await streams_of(self._jetstream, topic)
            for dead in await self._dead_letters(topic, streams):
                try:
                    streams += await streams_of(self._jetstream, dead)
                except TopicNotFound:
                    continue  # nothing was ever given up
            found |= {str(info.config["name"]): info for info in streams}
        if any(wire_format_of(info.config) is not None for info in found.values()):
            found[SCHEMAS_TOPIC] = await self._jetstream.stream_info(SCHEMAS_TOPIC)
        return list(found.values())

    async def _dead_letters(self, topic: str, streams: Sequence[StreamInfo]) -> set[str]:
        groups = await groups_of(self._jetstream, topic)
        found = {default_dead_letter_topic(topic, group) for group in groups}
        for info in streams:
            for consumer in await self._jetstream.consumers(str(info.config["name"])):
                if name := consumer.config.durable_name:
                    own = settings_of(consumer.config).dead_letter
                    found.add(own or default_dead_letter_topic(topic, name))
        return found

    async def _readers(self, infos: Sequence[StreamInfo]) -> dict[str, dict[str, Readers]]:
        """How far the durable consumers of every stream are; others end with their process."""

        async def of(info: StreamInfo) -> tuple[str, dict[str, Readers]]:
            name = str(info.config["name"])
            try:
                found = await self._jetstream.consumers(name)
            except TopicNotFound:
                found = []
            return name, {one.name: _position(one) for one in found if one.config.durable_name}

        return dict(await side_by_side(of, infos))

    async def _groups(self, topics: Sequence[str]) -> list[GroupRecord]:
        publisher = StreamPublisher(self._jetstream.connection)
        records = []
        try:
            for topic in topics:
                for group in await groups_of(self._jetstream, topic):
                    store = GroupStore(self._jetstream, publisher, topic, group)
                    for number, stored in (await store.partitions()).items():
                        records.append(GroupRecord(topic, group, number, stored.record))
        finally:
            publisher.close()
        return records

    async def _schemas(self, topics: Sequence[str]) -> dict[str, str]:
        found = {topic: await self._mill.schemas.find(topic) for topic in topics}
        return {topic: record.to_json() for topic, record in found.items() if record is not None}

    async def _account(self) -> str:
        _, answer = await self._jetstream.connection.request("$SYS.REQ.USER.INFO")
        data = msgspec.json.decode(answer, type=dict[str, Any]).get("data") or {}
        return str(data.get("account", ""))

    # -- one stream -----------------------------------------------------------------------

    async def _copy(self, info: StreamInfo) -> StreamBackup | None:
        """The copy of a stream; None if it was deleted in the meantime."""
        name = str(info.config["name"])
        before = self._done
        for attempt in range(1, TRIES + 1):
            self._done = before
            try:
                return await self._try(name)
            except TopicNotFound:
                return None
            except (ConnectError, RequestTimeout) as error:
                if attempt == TRIES or self._jetstream.connection.closed:
                    raise BackupError(
                        f"'{name}' could not be copied in {TRIES} attempts: {error}. "
                        f"No backup was written"
                    ) from error
            await asyncio.sleep(PAUSE_SECONDS)
        raise AssertionError("unreachable")

    async def _try(self, name: str) -> StreamBackup:
        path = self._path / f"{name}.archive"
        file = await asyncio.to_thread(path.open, "w+b")
        try:
            snapshot = await self._receive(name, file)
            added, end = await self._complete(name, snapshot, file)
            size, digest = await asyncio.to_thread(_settled, file)
        finally:
            await asyncio.to_thread(file.close)
        now = (await self._jetstream.stream_info(name)).state
        state = snapshot.state
        self._done += state.bytes
        return StreamBackup(
            name=name,
            topic=identity_of(snapshot.config).topic,
            file=path.name,
            bytes=size,
            sha256=await asyncio.to_thread(sha256_of, path),
            digest=digest,
            config=snapshot.config,
            state=state,
            end=max(end, now.last_seq),
            at_least=max(0, min(state.messages, now.messages - (now.last_seq - state.last_seq))),
            added=added,
            readers={},
        )

    async def _receive(self, name: str, file: BinaryIO) -> StreamSnapshot:
        """The server's own copy of a stream, into the file."""
        copy = StreamCopy(self._jetstream, name)
        try:
            snapshot = await copy.begin()
            written = 0
            async with aclosing(copy.parts()) as parts:  # type: ignore[type-var]
                async for part in parts:
                    await asyncio.to_thread(file.write, part)
                    written += len(part)
                    done = min(written, snapshot.state.bytes)  # it is compressed
                    self._progress(name, self._done + done, self._total)
        finally:
            copy.close()
        return snapshot

    async def _complete(
        self, name: str, snapshot: StreamSnapshot, file: BinaryIO
    ) -> tuple[int, int]:
        """Check that the copy is complete; add what replaced messages while it was made.

        Returns how many messages were added, and the last sequence in it.
        """
        size = await asyncio.to_thread(file.tell)
        ending = await asyncio.to_thread(Ending, file, size)
        state, config = snapshot.state, snapshot.config
        now = (await self._jetstream.stream_info(name)).state
        keeps_all = config.get("max_msgs_per_subject", -1) <= 0
        if keeps_all or now.last_seq == state.last_seq:
            return 0, state.last_seq
        if config.get("retention", "limits") != "limits":
            raise BackupError(
                f"'{name}' is a queue that keeps few messages of each subject, and it changed "
                f"while it was copied: some may be missing. Stop what writes to it, then try again"
            )
        await asyncio.to_thread(ending.cut)
        tail = _Tail(self._jetstream, name, state.last_seq, ending)
        await tail.read(now.last_seq)
        await asyncio.to_thread(ending.finish)
        return tail.added, tail.last


class _Tail:
    """Adds the messages after a copy to it."""

    def __init__(self, jetstream: JetStream, stream: str, last: int, ending: Ending) -> None:
        self._jetstream, self._stream, self._ending = jetstream, stream, ending
        self.added, self.last = 0, last

    async def read(self, reach: int) -> None:
        """Read to the end of the log, which is at `reach` or later.

        Only then every message that is missing because it was replaced has its replacement in the
        archive. A replica may lag, and so may its end.
        """
        what = Range(self.last + 1, over_loss=True)
        reader = OrderedConsumer(self._jetstream, self._stream, what)
        try:
            await reader.open()
            while not await self._take(reader, reach):
                if not await reader.signal.wait(TAIL_SECONDS):
                    raise ConnectError(f"nothing of '{self._stream}' came for {TAIL_SECONDS:g} s")
        finally:
            reader.close()

    async def _take(self, reader: OrderedConsumer, reach: int) -> bool:
        """Take what has arrived; whether that was all."""
        while messages := reader.take_now(TAIL_BATCH):
            await asyncio.to_thread(self._ending.add, list(map(_entry, messages)))
            self.added += len(messages)
            address = parse_ack_address(messages[-1].reply)
            self.last = address.sequence
            if address.pending == 0 and self.last >= reach:
                return True
        ask = {"seq": self.last + 1, "next_by_subj": ">"}
        return await self._jetstream.get_message(self._stream, ask) is None


def _settled(file: BinaryIO) -> tuple[int, str]:
    """Make a file durable; its size and the digest of its messages."""
    file.flush()
    os.fsync(file.fileno())
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    digest = MessageDigest()
    while part := file.read(1 << 20):
        digest.feed(part)
    return size, digest.value


def _entry(message: RawMessage) -> ArchiveEntry:
    address = parse_ack_address(message.reply)
    return ArchiveEntry(
        message.subject, address.timestamp_ns, address.sequence, message.headers, message.payload
    )


def _position(consumer: ConsumerInfo) -> Readers:
    return Readers(consumer.ack_floor.consumer_seq, consumer.ack_floor.stream_seq)


def _order(info: StreamInfo) -> tuple[int, str]:
    """Positions of groups, queues, all others, schemas."""
    name = str(info.config["name"])
    if name == RECORDS:
        return 0, name
    if name == SCHEMAS_TOPIC:
        return 3, name
    return (2 if info.config.get("retention", "limits") == "limits" else 1), name


def present_time() -> str:
    """The time as manifests have it."""
    return datetime.fromtimestamp(now_ns() / 1e9, UTC).isoformat(timespec="seconds")
