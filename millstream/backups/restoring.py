"""Restore a backup, or topics of it, and verify what was restored.

Everything that can be checked is checked before anything is created: the manifest, the checksum of
every file, that no stream of these names exists, and that the schemas fit. Whatever fails
afterwards removes the streams that were created, so that the restore can be run again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from millstream.backups.manifest import (
    GroupRecord,
    Manifest,
    Progress,
    StreamBackup,
    check_file,
    read,
    topics_of,
)
from millstream.deadline import Deadline
from millstream.errors import (
    ApiError,
    BackupError,
    ConnectError,
    DataLoss,
    MillstreamError,
    RequestTimeout,
    SchemaNotFound,
    TopicNotFound,
)
from millstream.messaging.groups.store import RECORDS, GroupStore
from millstream.messaging.topics.durability import check_health, is_clustered
from millstream.mill import Mill
from millstream.schemas.registry.records import read_record
from millstream.settings import SCHEMAS_TOPIC
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.aio.snapshots import StreamCopy, StreamSnapshot, restore_stream
from millstream.wire.api import StreamInfo, StreamState
from millstream.wire.archive import Floor, Head, MessageDigest, opened

__all__ = ["RestoredStream", "Restoring", "restore"]

TRIES: Final = 3
CURRENT_SECONDS: Final = 120.0  # for the replicas of a cluster to have everything
PAUSE_SECONDS: Final = 0.2
PUT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class RestoredStream:
    """One stream after its restore. `compared`: every message is the same as in the backup."""

    stream: str
    topic: str
    messages: int
    first_offset: int
    last_offset: int
    subscriptions: int
    compared: bool
    note: str = ""


async def restore(
    mill: Mill, folder: Path, topics: Sequence[str], progress: Progress
) -> tuple[Manifest, list[RestoredStream]]:
    """Restore a backup, or some of its topics, and verify it; BackupError says what is there."""
    manifest = await asyncio.to_thread(read, folder)
    restoring = Restoring(mill, folder, manifest, progress)
    await restoring.check(topics)
    return manifest, await restoring.create()


class Restoring:
    """One restore."""

    def __init__(self, mill: Mill, folder: Path, manifest: Manifest, progress: Progress) -> None:
        self._mill, self._folder, self._manifest = mill, folder, manifest
        self._progress = progress
        self._jetstream: JetStream = mill.jetstream
        self._clustered = is_clustered(mill.jetstream.connection)
        self._whole = False
        self._chosen: list[StreamBackup] = []
        self._created: list[str] = []
        self._done = self._total = 0

    async def check(self, topics: Sequence[str]) -> None:
        """Choose the topics, or all, and check whatever can be checked; nothing is created."""
        self._whole = self._manifest.whole and not topics
        self._chosen = await self._choose(topics)
        for stream in self._chosen:
            await asyncio.to_thread(check_file, self._folder, stream)
        if not self._whole:
            restored = any(stream.name == SCHEMAS_TOPIC for stream in self._chosen)
            await self._check_schemas(topics_of(self._chosen), restored)
        await check_health(self._jetstream)  # a create on unreadable files deletes them

    async def create(self) -> list[RestoredStream]:
        """Restore what was checked; if that fails, it is removed."""
        self._total = sum(stream.bytes for stream in self._chosen)
        names = topics_of(self._chosen)
        try:
            restored = [await self._restore(stream) for stream in self._chosen]
            if not self._whole:
                await self._restore_groups(names)
                await self._restore_schemas(names)
        except BaseException as error:
            left = await asyncio.shield(self.remove())
            if left and isinstance(error, MillstreamError):
                raise BackupError(
                    f"{error}. These streams exist and are not complete, delete them: "
                    f"{', '.join(left)}"
                ) from error
            raise
        return restored

    # -- before anything is created -------------------------------------------------------

    async def _choose(self, topics: Sequence[str]) -> list[StreamBackup]:
        """What to restore; BackupError if some of it exists or is not in the backup."""
        streams = self._manifest.streams
        known = topics_of(streams)
        if missing := sorted({*topics} - {*known}):
            raise BackupError(
                f"the backup has no topic {', '.join(map(repr, missing))}; it has "
                f"{', '.join(known)}"
            )
        existing = {str(config["name"]) for config in await self._jetstream.stream_configs()}
        if topics:
            streams = [s for s in streams if s.topic in topics or s.name == SCHEMAS_TOPIC]
        if not self._whole:
            streams = [s for s in streams if s.name != RECORDS]
            if SCHEMAS_TOPIC in existing or not self._needs_schemas(streams):
                streams = [s for s in streams if s.name != SCHEMAS_TOPIC]
        if taken := sorted({s.name for s in streams} & existing):
            raise BackupError(
                f"nothing was restored, because these streams exist: {', '.join(taken)}. A restore "
                f"never replaces anything: delete them first, or restore into another broker"
            )
        return streams

    def _needs_schemas(self, streams: Sequence[StreamBackup]) -> bool:
        return any(s.topic in self._manifest.schemas for s in streams)

    async def _check_schemas(self, topics: Sequence[str], restored: bool) -> None:
        """Events name their schema by its number: that must be the same schema here."""
        if restored:
            return
        registry = self._mill.schemas
        for topic in topics:
            if topic not in self._manifest.schemas:
                continue
            record = read_record(self._manifest.schemas[topic].encode())
            found = await registry.find(topic)
            try:
                schemas = await registry.schemas_of(record)
            except (SchemaNotFound, DataLoss):
                schemas = []
            if [s.fingerprint for s in schemas] != [v.fingerprint for v in record.versions]:
                raise BackupError(
                    f"nothing was restored: the schemas of topic '{topic}' have other numbers in "
                    f"this broker, and its events name them by number. Restore it into an empty "
                    f"broker"
                )
            if found is not None and found != record:
                raise BackupError(
                    f"nothing was restored: this broker has other schema versions of topic "
                    f"'{topic}' than the backup. Delete the topic first: 'millstream topic rm "
                    f"{topic}'"
                )

    # -- streams --------------------------------------------------------------------------

    async def _restore(self, stream: StreamBackup) -> RestoredStream:
        config, note = self._adapted(stream.config)
        before = self._done
        for attempt in range(1, TRIES + 1):
            self._done = before
            self._created.append(stream.name)
            try:
                info = await self._send(stream, config)
                break
            except ApiError:
                self._created.remove(stream.name)  # it was not accepted: what exists is not ours
                raise
            except (ConnectError, RequestTimeout) as error:
                if attempt == TRIES or self._jetstream.connection.closed:
                    raise BackupError(
                        f"'{stream.name}' could not be restored in {TRIES} attempts: {error}"
                    ) from error
                await self._delete(stream.name)
        self._check_state(stream, info)
        await self._wait_current(stream.name)
        compared, why = await self._compare(stream)
        if config != stream.config and stream.config.get("max_age"):
            config = {**config, "max_age": stream.config["max_age"]}
            await self._jetstream.update_stream(config)
        await self._wait_readers(stream)
        state = info.state
        notes = "; ".join(filter(None, (note, why)))
        return RestoredStream(
            *(stream.name, stream.topic, state.messages, state.first_seq, state.last_seq),
            subscriptions=len(stream.readers),
            compared=compared,
            note=notes,
        )

    def _adapted(self, config: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The configuration to restore with, and what is different about it in the end.

        Nothing expires until it is verified.
        """
        changed = {**config, "max_age": 0}
        replicas = config.get("num_replicas", 1)
        if self._clustered or replicas <= 1:
            return changed, ""
        changed.pop("placement", None)
        return {**changed, "num_replicas": 1}, f"1 replica instead of {replicas}: it is one node"

    async def _send(self, stream: StreamBackup, config: dict[str, Any]) -> StreamInfo:
        path = self._folder / stream.file
        floors = {name: Floor(at.consumer, at.stream) for name, at in stream.readers.items()}
        head = Head(stream.end, floors, config.get("num_replicas", 1), stream.added)

        def sent(size: int) -> None:
            self._done += size
            self._progress(stream.name, self._done, self._total)

        file = await asyncio.to_thread(path.open, "rb")
        try:
            content = opened(file, stream.bytes, head)
            return await restore_stream(
                self._jetstream, StreamSnapshot(config, stream.state), content, sent
            )
        finally:
            await asyncio.to_thread(file.close)

    async def remove(self) -> list[str]:
        """Delete what was created; the names of what could not be deleted."""
        left = []
        for name in dict.fromkeys(self._created):
            try:
                await self._delete(name)
            except MillstreamError:
                left.append(name)
        return left

    async def _delete(self, name: str) -> None:
        with contextlib.suppress(TopicNotFound):  # the server had not begun
            await self._jetstream.delete_stream(name)

    # -- verifying ------------------------------------------------------------------------

    def _check_state(self, stream: StreamBackup, info: StreamInfo) -> None:
        """The restored log ends where it must, and has as many messages as were copied."""
        found = info.state
        most = stream.state.messages + stream.added
        # Messages with an expiry of their own that has passed are not stored again.
        expires = bool(stream.config.get("allow_msg_ttl"))
        # A copy of a stream that keeps few of each subject may hold some that were replaced.
        least = 0 if stream.added or expires else stream.at_least
        if found.last_seq != stream.end or not least <= found.messages <= most:
            raise BackupError(
                f"'{stream.name}' was restored with {found.messages:,} messages up to offset "
                f"{found.last_seq}, and the backup has {least:,} to {most:,} up to {stream.end}"
            )

    async def _wait_current(self, name: str) -> None:
        """Wait until all replicas have everything."""
        deadline = Deadline(CURRENT_SECONDS)
        while True:
            info = await self._jetstream.stream_info(name)
            replicas = info.cluster.replicas if info.cluster is not None else []
            if all(peer.current and not peer.offline for peer in replicas):
                return
            if deadline.passed:
                late = ", ".join(peer.name for peer in replicas if not peer.current)
                raise BackupError(
                    f"'{name}' was restored, but after {CURRENT_SECONDS:g} s {late} does not have "
                    f"all of it"
                )
            await asyncio.sleep(PAUSE_SECONDS)

    async def _wait_readers(self, stream: StreamBackup) -> None:
        """Wait until all subscriptions are there: a cluster creates them after the stream."""
        deadline = Deadline(CURRENT_SECONDS)
        while True:
            found = {one.name for one in await self._jetstream.consumers(stream.name)}
            lost = sorted(stream.readers.keys() - found)
            if not lost:
                return
            if deadline.passed:
                raise BackupError(
                    f"'{stream.name}' was restored without its subscriptions {', '.join(lost)}"
                )
            await asyncio.sleep(PAUSE_SECONDS)

    async def _compare(self, stream: StreamBackup) -> tuple[bool, str]:
        """Whether every message is the same as in the backup; if that cannot be known, why not.

        The server copies the restored stream once more, and the digests are compared.
        """
        found, state = await self._digest(stream.name)
        if found == stream.digest:
            return True, ""
        now = (await self._jetstream.stream_info(stream.name)).state
        if state.last_seq != stream.end or now.messages != state.messages:
            return False, "it was used before it could be compared"
        if stream.added:
            return False, "replaced values were left out, so it was not compared byte by byte"
        if stream.config.get("allow_msg_ttl") and now.messages < stream.at_least:
            return False, "some messages have expired"
        if stream.config.get("mirror") or stream.config.get("sources"):
            return False, "it copies from its origins again"
        raise BackupError(
            f"'{stream.name}' was restored, but its messages are not those of the backup: "
            f"{found} instead of {stream.digest}"
        )

    async def _digest(self, name: str) -> tuple[str, StreamState]:
        """The digest of all messages of a stream, as the server copies it, and its state."""
        for attempt in range(1, TRIES + 1):
            copy = StreamCopy(self._jetstream, name)
            digest = MessageDigest()
            try:
                snapshot = await copy.begin(consumers=False)
                async with aclosing(copy.parts()) as parts:  # type: ignore[type-var]
                    async for part in parts:
                        digest.feed(part)
                return digest.value, snapshot.state
            except (ConnectError, RequestTimeout) as error:
                if attempt == TRIES or self._jetstream.connection.closed:
                    raise BackupError(
                        f"'{name}' was restored, but could not be compared: {error}"
                    ) from error
            finally:
                copy.close()
            await asyncio.sleep(PAUSE_SECONDS)
        raise AssertionError("unreachable")

    # -- what belongs to single topics ----------------------------------------------------

    async def _restore_groups(self, topics: Sequence[str]) -> None:
        """The positions of groups, instead of newer ones that are left of a deleted topic."""
        found: dict[tuple[str, str], list[GroupRecord]] = {}
        for record in self._manifest.groups:
            if record.topic in topics:
                found.setdefault((record.topic, record.group), []).append(record)
        publisher = StreamPublisher(self._jetstream.connection)
        try:
            for (topic, group), records in found.items():
                store = GroupStore(self._jetstream, publisher, topic, group)
                await store.declare(replicas=1)
                await store.forget()
                for one in records:
                    free = msgspec.structs.replace(one.record, owner="")
                    await store.put_partition(one.partition, free, 0, PUT_SECONDS)
        finally:
            publisher.close()

    async def _restore_schemas(self, topics: Sequence[str]) -> None:
        for topic in topics:
            if topic in self._manifest.schemas:
                record = read_record(self._manifest.schemas[topic].encode())
                await self._mill.schemas.adopt(topic, record)
