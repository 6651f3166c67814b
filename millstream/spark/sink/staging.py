"""Staged writes: tasks store their packs aside, the driver makes them visible once.

For batches that must become visible completely or not at all, and for queries whose rows may move
between tasks when a batch is run again.

1. Each attempt of each task stores its packs in a staging stream, which no reader of a topic sees.
2. Spark reports to the driver which attempts count; it stores the list of their packs, the
   manifest. The first manifest of a batch stays valid when the batch is run again.
3. It copies the packs into the topics, in the order of the manifest, each partition under a fence
   (see chain.py). The list is fixed, so an interrupted copy continues where it stopped.
4. It removes what was staged for the batch, including the packs of attempts that did not count.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from millstream.errors import (
    ApiError,
    ConnectError,
    DataLoss,
    PartlyWritten,
    PermissionDenied,
    RequestTimeout,
    TopicConflict,
    WrongSequence,
)
from millstream.events.fence import FenceState, read_state, state_headers
from millstream.events.packs.pack import EncodedPack
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import PATIENCE_SECONDS, connection_to, jetstream_to
from millstream.spark.sink.chain import Chain
from millstream.spark.sink.targets import Target, find_target
from millstream.spark.sink.task_sink import Packer, TaskRows, chain_of
from millstream.wire.api import StreamInfo, parse_ack_address
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers, parse_headers, unique_token
from millstream.wire.sync.connection import BlockingJetStream
from millstream.wire.sync.publish import publish_one, publish_pipelined
from millstream.wire.sync.range import read_range
from millstream.wire.sync.streams import find_stream, get_message

__all__ = ["STREAM", "StagedPack", "Staging", "ensure_staging"]

STREAM: Final = "mill-staging"
# What a failed query left is removed automatically; a query must be restarted within this time.
MAX_AGE_DAYS: Final = 7
_DAY_NS: Final = 86_400_000_000_000
_RACES_MAX: Final = 20
# Why something cannot be removed or changed now; users of the role `app` may never do it.
_NOT_NOW: Final = (ApiError, ConnectError, PermissionDenied, RequestTimeout)


@dataclass(frozen=True, slots=True)
class StagedPack:
    """A pack in the staging stream, and the partition it is for."""

    topic: str
    partition: int
    sequence: int


def ensure_staging(settings: ConnectionSettings, replicas: int) -> None:
    """Create the staging stream if it does not exist."""
    jetstream = jetstream_to(settings)
    found = find_stream(jetstream, STREAM, PATIENCE_SECONDS)
    if found is not None:
        _forbid_rollups(jetstream, found)
        return
    config = {
        "name": STREAM,
        "subjects": [f"{STREAM}.>"],
        "description": "Packs that Spark queries have written and not yet committed",
        "max_age": MAX_AGE_DAYS * _DAY_NS,
        "num_replicas": replicas,
        "storage": "file",
        "max_consumers": 100_000,
    }
    try:
        jetstream.ask(f"STREAM.CREATE.{STREAM}", config, PATIENCE_SECONDS)
    except TopicConflict:
        return  # another query created it in the meantime


def _forbid_rollups(jetstream: BlockingJetStream, found: StreamInfo) -> None:
    """Take roll-ups from the stream of an earlier version: one publish could remove all of it."""
    if not found.config.get("allow_rollup_hdrs", False):
        return
    try:
        config = {**found.config, "allow_rollup_hdrs": False}
        jetstream.ask(f"STREAM.UPDATE.{STREAM}", config, PATIENCE_SECONDS)
    except _NOT_NOW:
        return  # only an admin may; the queries of others work as before


class Staging:
    """The staged packs of one writer and batch."""

    def __init__(self, settings: ConnectionSettings, writer: str, batch: int) -> None:
        self._settings = settings
        self._writer = writer
        self._batch = batch
        self._manifests = f"{STREAM}.{writer}.manifest"

    # -- tasks ----------------------------------------------------------------------------

    def stage(
        self, rows: TaskRows, batches: Iterable[pa.RecordBatch]
    ) -> tuple[int, tuple[StagedPack, ...]]:
        """Store a task's packs aside; returns the number of rows and the staged packs."""
        if self._last_manifest().position > self._batch:
            return sum(batch.num_rows for batch in batches), ()
        subject = f"{STREAM}.{self._writer}.{self._batch}.{rows.task}.{unique_token(8)}".encode()
        partitions: list[tuple[str, int]] = []  # of each pack: topic and number
        waiting: list[OutgoingMessage] = []
        sequences: list[int] = []

        def packer_for(target: Target, number: int) -> Packer:
            def give(pack: EncodedPack) -> None:
                partitions.append((target.topic, number))
                pairs = [("Nats-Msg-Id", unique_token()), *pack.headers.items()]
                payload = memoryview(pack.payload).tobytes()
                waiting.append(OutgoingMessage(subject, encode_headers(pairs), payload))
                if len(waiting) >= 16:
                    self._send(waiting, sequences)

            return Packer(target, rows.options, give)

        total = rows.distribute(batches, packer_for)
        self._send(waiting, sequences)
        packs = tuple(
            StagedPack(topic, number, sequence)
            for (topic, number), sequence in zip(partitions, sequences, strict=True)
        )
        return total, packs

    def _send(self, waiting: list[OutgoingMessage], sequences: list[int]) -> None:
        connection = connection_to(self._settings)
        acks = publish_pipelined(connection, waiting, PATIENCE_SECONDS)
        sequences.extend(ack.seq for ack in acks)
        waiting.clear()

    # -- driver ---------------------------------------------------------------------------

    def commit(self, packs: Sequence[StagedPack]) -> None:
        """Make the batch visible exactly once, even if this is called again."""
        manifest = self._agree(sorted(packs, key=lambda pack: pack.sequence))
        if manifest:
            self._copy(manifest)
            self.discard()
            self._purge({"filter": self._manifests, "keep": 1})

    def discard(self, unless_listed: bool = False) -> None:
        """Remove what was staged for the batch; what cannot be removed now expires later.

        With `unless_listed` a batch that has a manifest keeps its packs: when it is run again, the
        manifest is valid and its packs are copied.
        """
        try:
            if unless_listed and self._last_manifest().position > self._batch:
                return
        except _NOT_NOW:
            return
        self._purge({"filter": f"{STREAM}.{self._writer}.{self._batch}.>"})

    def _purge(self, what: dict[str, Any]) -> None:
        try:
            jetstream_to(self._settings).ask(f"STREAM.PURGE.{STREAM}", what)
        except _NOT_NOW:
            return

    def _last_manifest(self) -> FenceState:
        return self._read_manifest()[0]

    def _read_manifest(self) -> tuple[FenceState, bytes]:
        ask = {"last_by_subj": self._manifests}
        found = get_message(jetstream_to(self._settings), STREAM, ask, PATIENCE_SECONDS)
        if found is None:
            return FenceState(), b""
        return read_state(found.sequence, found.headers), found.payload

    def _agree(self, packs: list[StagedPack]) -> list[StagedPack]:
        """The manifest of the batch: this one, or the one that was stored first."""
        for _ in range(_RACES_MAX):
            state, payload = self._read_manifest()
            if state.position == self._batch + 1:
                return _parse(payload)
            if state.position > self._batch or not packs:
                return []  # a later batch has started, so this one is complete; or no rows
            wanted = state.next(self._batch + 1)
            block = encode_headers(state_headers(self._writer, wanted))
            message = OutgoingMessage(self._manifests.encode(), block, _text(packs))
            try:
                publish_one(connection_to(self._settings), message, PATIENCE_SECONDS)
            except WrongSequence:
                continue
            return packs
        raise DataLoss(
            f"the manifest of writer '{self._writer}' keeps changing: are two drivers running?"
        )

    def _copy(self, packs: list[StagedPack]) -> None:
        chains = self._open_chains({(pack.topic, pack.partition) for pack in packs})
        try:
            left = {key: chain for key, chain in chains.items() if not chain.is_complete()}
            wanted = {
                pack.sequence: left[pack.topic, pack.partition]
                for pack in packs
                if (pack.topic, pack.partition) in left
            }
            if wanted:
                self._fill(wanted)
            for chain in left.values():
                chain.finish()
        except Exception as error:
            written = [
                f"{topic}/{number}: {chain.report}"
                for (topic, number), chain in chains.items()
                if chain.known_rows
            ]
            if written:
                raise PartlyWritten(self._writer, written, str(error)) from error
            raise

    def _fill(self, wanted: dict[int, Chain]) -> None:
        seen = 0
        first, end = min(wanted), max(wanted) + 1
        subjects = (f"{STREAM}.{self._writer}.{self._batch}.>",)
        for messages in read_range(connection_to(self._settings), STREAM, first, end, subjects):
            for message in messages:
                chain = wanted.get(parse_ack_address(message.reply).sequence)
                if chain is not None:
                    seen += 1
                    chain.add(_pack(message))
        if seen < len(wanted):
            raise DataLoss(
                f"{len(wanted) - seen} of {len(wanted)} packs that writer '{self._writer}' staged "
                f"for batch {self._batch} are gone from '{STREAM}', which keeps them for "
                f"{MAX_AGE_DAYS} days"
            )

    def _open_chains(self, partitions: set[tuple[str, int]]) -> dict[tuple[str, int], Chain]:
        """A chain for each partition, in their order."""
        topics = {topic for topic, _ in partitions}
        targets = {topic: find_target(self._settings, topic) for topic in topics}
        writer = f"{self._writer}-staged"
        return {
            (topic, number): chain_of(self._settings, targets[topic], number, writer, self._batch)
            for topic, number in sorted(partitions)
        }


def _pack(message: Any) -> EncodedPack:
    headers = parse_headers(message.headers)
    own = {name: text for name, text in headers.items() if not name.startswith("Nats-")}
    return EncodedPack(own, pa.py_buffer(message.payload), int(own["Mill-Count"]))


def _text(packs: Sequence[StagedPack]) -> bytes:
    rows = [[pack.topic, pack.partition, pack.sequence] for pack in packs]
    return zlib.compress(json.dumps(rows).encode())


def _parse(payload: bytes) -> list[StagedPack]:
    return [StagedPack(*row) for row in json.loads(zlib.decompress(payload))]
