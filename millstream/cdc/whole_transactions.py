"""Whole transactions of a database, read back from the topics of its tables.

    async for transaction in transactions(mill, ["orders", "items"], capture="shop"):
        for row in transaction.rows:
            ...
        keep(transaction.resume)        # later: transactions(..., start=kept)

A capture writes each table to a topic of its own, so the rows of one transaction are in several.
Every row says which transaction it belongs to and how many rows that has, and every pack says up
to which commit its topic is written: a transaction is whole when no topic can bring more of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.sink.topic_positions import TopicPosition
from millstream.cdc.table_topic import writer_name
from millstream.cdc.topic_log import Chunk, TopicLog
from millstream.errors import CaptureError, ConfigError
from millstream.events import changes as ch
from millstream.events.fence import fence_subject
from millstream.events.positions import order_of

if TYPE_CHECKING:
    from millstream.mill import Mill

__all__ = ["ChangedRow", "Transaction", "transactions"]

MAX_ROWS: Final = 250_000
# By topic: offset and index of the next event, and when the log was created.
Resume: TypeAlias = Mapping[str, tuple[int, int, str]]
_NOTHING: Final = (-1, -1)


class ChangedRow(NamedTuple):
    """One change of one row."""

    table: str  # "public.orders"
    op: str  # of events.changes.OPS
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    key: str | None  # of the event
    unchanged: tuple[str, ...] = ()  # columns of `after` that were not sent, and kept their value


@dataclass(frozen=True, slots=True)
class Transaction:
    """All rows that a transaction changed, in their order.

    A row of a snapshot, or of a source that does not count its rows, comes on its own: its `total`
    is None.
    """

    id: str | None  # the database's name for it; None: a row of a snapshot
    commit: int
    time: datetime | None
    total: int | None  # rows that it has, by the source
    rows: list[ChangedRow]
    resume: Resume = field(repr=False)  # `start` for what follows it; plain data
    # Whether rows with all numbers up to `total` are here. Others are in topics that were not
    # given, or were stored as rows of a snapshot.
    complete: bool = True


async def transactions(
    mill: Mill,
    topics: Sequence[str],
    *,
    capture: str,
    start: Resume | None = None,
    follow: bool = True,
    max_rows: int = MAX_ROWS,
) -> AsyncGenerator[Transaction, None]:
    """The transactions of a capture in the order of their commits, each whole and once.

    `topics` are those of its tables, with format="changes". A transaction is delivered when every
    topic is written past its commit, or all of its rows are here: a topic without changes says so
    every `heartbeat` seconds of the capture. `start` is the `resume` of the last transaction that
    was handled. At most `max_rows` rows are held. Without `follow` it ends with the last
    transaction that is whole now.
    """
    if not topics or len(set(topics)) != len(topics):
        raise ConfigError("give the topics of the capture's tables, each once")
    sources = [await _open(mill, name, capture, start) for name in topics]
    merge = _Merge(sources, max_rows)
    async with aclosing(merge.run(follow)) as found:
        async for transaction in found:
            yield transaction


async def _open(mill: Mill, name: str, capture: str, start: Resume | None) -> _Source:
    writer = writer_name(capture)
    log = TopicLog(mill, name, writer=writer)
    await log.open()
    if log.format != "changes" or log.topic.partitions != 1:
        raise ConfigError(
            f"topic '{name}' is not one of changes with one partition: transactions are known only "
            f'in topics that a capture writes with format = "changes"'
        )
    handle = log.topic.handle
    subject = fence_subject(handle.shape.prefixes[0], writer)
    partition = handle.partitions[0]
    ask = {"last_by_subj": subject}
    if await handle.jetstream.get_message(partition.stream, ask) is None:
        raise ConfigError(
            f"topic '{name}' was never written by capture '{capture}', so how far it is cannot be "
            f"known. Check both names"
        )
    state = (await log.states())[0]
    position = TopicPosition(state.first)
    if start is not None and name in start:
        offset, index, created = start[name]
        position = await log.check(0, TopicPosition(offset, index), created, state)
    return _Source(log, position, state.created)


@dataclass(slots=True)
class _Run:
    """Consecutive rows of one topic that belong together: of one commit, or one row alone."""

    commit: int
    alone: bool  # a unit of its own
    parts: list[pa.RecordBatch]
    position: tuple[int, int]  # of its first row

    @property
    def size(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def ends_with_deletion(self) -> bool:
        """Whether its last row may be the first half of a change of key."""
        return bool(_source_of(self.parts[-1], ch.OP)[-1].as_py() == ch.DELETE)

    def goes_on_with(self, run: _Run) -> bool:
        """Whether the rows of another run belong to this one."""
        return self.commit == run.commit and not self.alone and not run.alone


class _Source:
    """One topic: what was read of it and is not delivered yet."""

    def __init__(self, log: TopicLog, start: TopicPosition, created: str) -> None:
        self.log, self.name, self._start, self._created = log, log.name, start, created
        self.runs: deque[_Run] = deque()  # bounded by the rows that are held
        self.written: tuple[int, int] = _NOTHING  # everything up to here is read
        self.reached = (start.offset, start.index)
        self.ended = False
        self.next: asyncio.Task[Chunk | None] | None = None

    @property
    def resume(self) -> tuple[int, int, str]:
        """The first event that is not delivered."""
        return (*(self.runs[0].position if self.runs else self.reached), self._created)

    def read(self, follow: bool) -> AsyncIterator[Chunk]:
        """The chunks from the start on."""
        return self.log.chunks({0: self._start}, follow)

    def add(self, chunk: Chunk) -> int:
        """Keep the rows of a chunk; returns how many."""
        count = 0
        for batch in chunk.events:
            rows = batch
            if batch.column("offset")[0].as_py() == self._start.offset:
                rows = _after(batch, self._start)
            count += rows.num_rows
            for run in _runs_of(rows):
                last = self.runs[-1] if self.runs else None
                if last is not None and last.goes_on_with(run):
                    last.parts.extend(run.parts)
                else:
                    self.runs.append(run)
        self.reached = chunk.reached.key
        if chunk.written is not None:
            self.written = max(self.written, order_of(chunk.written))
        return count


def _after(batch: pa.RecordBatch, start: TopicPosition) -> pa.RecordBatch:
    same = pc.equal(batch.column("offset"), start.offset)
    before = pc.and_(same, pc.less(batch.column("index"), start.index))
    return batch.filter(pc.invert(before))


def _source_of(batch: pa.RecordBatch, *path: str) -> Any:
    return pc.struct_field(batch.column("value"), list(path))


def _runs_of(batch: pa.RecordBatch) -> Iterator[_Run]:
    """The rows of a batch, by commit; those without a total one by one."""
    commits = _source_of(batch, ch.SOURCE, ch.COMMIT).to_pylist()
    totals = _source_of(batch, ch.SOURCE, ch.TOTAL).to_pylist()
    offsets, indexes = batch.column("offset"), batch.column("index")
    row = 0
    while row < len(commits):
        end, alone = row + 1, totals[row] is None
        while not alone and end < len(commits) and totals[end] is not None:
            if commits[end] != commits[row]:
                break
            end += 1
        position = (offsets[row].as_py(), indexes[row].as_py())
        yield _Run(commits[row] or 0, alone, [batch.slice(row, end - row)], position)
        row = end


class _Merge:
    """Puts the rows of several topics together again."""

    def __init__(self, sources: Sequence[_Source], max_rows: int) -> None:
        self._sources, self._max_rows = sources, max_rows
        self._held = 0

    async def run(self, follow: bool) -> AsyncGenerator[Transaction, None]:
        readers = [source.read(follow) for source in self._sources]
        try:
            while True:
                while (found := self._next()) is not None:
                    yield found
                if not await self._more(readers):
                    return
        finally:
            waiting = [source.next for source in self._sources if source.next is not None]
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for reader in readers:
                if isinstance(reader, AsyncGenerator):
                    await reader.aclose()

    # -- reading --------------------------------------------------------------------------

    async def _more(self, readers: Sequence[AsyncIterator[Chunk]]) -> bool:
        """Read on where something is missing; False: there is nothing more to read.

        Topics that are ahead of others wait, so that little is held.
        """
        least = min(source.written[0] for source in self._sources)
        wanted = []
        for source, reader in zip(self._sources, readers, strict=True):
            if source.ended or (source.runs and source.written[0] > least):
                continue
            if source.next is None:
                source.next = asyncio.create_task(_next_chunk(reader))
            wanted.append(source)
        tasks = {source.next for source in wanted if source.next is not None}
        if not tasks:
            return False
        await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
        for source in wanted:
            if source.next is not None and source.next.done():
                chunk, source.next = source.next.result(), None
                if chunk is None:
                    source.ended = True
                else:
                    self._held += source.add(chunk)
        if self._held > self._max_rows:
            self._refuse()
        return True

    def _refuse(self) -> None:
        behind = min(self._sources, key=lambda source: source.written)
        commit = min(source.runs[0].commit for source in self._sources if source.runs)
        raise CaptureError(
            f"more than {self._max_rows:,} rows are held for transactions that are not whole: the "
            f"first is that of commit {commit}, and topic '{behind.name}' is written up to "
            f"{behind.written[0]}. If transactions are that large, raise max_rows"
        )

    # -- delivering -----------------------------------------------------------------------

    def _next(self) -> Transaction | None:
        for source in self._sources:
            if source.runs and source.runs[0].alone:
                return self._deliver([source])
        waiting = [source for source in self._sources if source.runs]
        if not waiting:
            return None
        commit = min(source.runs[0].commit for source in waiting)
        having = [source for source in waiting if source.runs[0].commit == commit]
        # A topic that is written up to a part of this commit may bring more of it, a topic that
        # is behind it also earlier ones.
        if all(source.written[0] > commit for source in self._sources):
            return self._deliver(having)
        if any(source.written[0] < commit for source in self._sources):
            return None
        if any(s.written[0] == commit and s.runs[0].ends_with_deletion for s in having):
            return None
        return self._deliver(having) if _is_complete([s.runs[0] for s in having]) else None

    def _deliver(self, having: Sequence[_Source]) -> Transaction:
        runs = [source.runs.popleft() for source in having]
        self._held -= sum(run.size for run in runs)
        first = runs[0].parts[0]
        head = _source_of(first.slice(0, 1), ch.SOURCE)[0].as_py()
        numbered = [item for run in runs for part in run.parts for item in _rows_of(part)]
        numbered.sort(key=lambda item: item[0])  # stable: the halves of a key change stay in order
        return Transaction(
            head[ch.TRANSACTION],
            runs[0].commit,
            head[ch.TIME],
            head[ch.TOTAL],
            [row for _, row in numbered],
            {source.name: source.resume for source in self._sources},
            runs[0].alone or _is_complete(runs),
        )


async def _next_chunk(reader: AsyncIterator[Chunk]) -> Chunk | None:
    return await anext(reader, None)


def _is_complete(runs: Sequence[_Run]) -> bool:
    numbers: set[int] = set()
    for run in runs:
        for part in run.parts:
            numbers.update(_source_of(part, ch.SOURCE, ch.NUMBER).to_pylist())
    total = _source_of(runs[0].parts[0], ch.SOURCE, ch.TOTAL)[0].as_py()
    return total is None or len(numbers - {None}) == total


def _rows_of(batch: pa.RecordBatch) -> Iterator[tuple[int, ChangedRow]]:
    for key, value in zip(
        batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True
    ):
        source = value[ch.SOURCE]
        yield (
            source[ch.NUMBER] or 0,
            ChangedRow(
                source[ch.TABLE],
                value[ch.OP],
                value[ch.BEFORE],
                value[ch.AFTER],
                None if key is None else key.decode("utf-8", "surrogateescape"),
                tuple(value[ch.UNCHANGED] or ()),
            ),
        )
