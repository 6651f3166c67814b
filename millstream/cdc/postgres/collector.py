"""Gathers the messages of the replication stream into runs of changes, by whole transactions. Pure.

How many rows a transaction has is known only when it ends, and its rows must say so: they wait
until then, in memory or, if they are many, in a file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO, Final

from millstream.cdc.postgres.pgoutput import (
    BEGIN,
    COMMIT,
    DELETE,
    INSERT,
    RELATION,
    TRUNCATE,
    UPDATE,
    Relation,
    parse_begin,
    parse_commit,
    parse_relation,
    parse_truncate,
)
from millstream.errors import LogUnreadable

__all__ = ["CommittedTransaction", "RowRun", "Spill", "TransactionCollector", "Truncated"]

_ROWS: Final = frozenset((INSERT, UPDATE, DELETE))
_KEPT: Final = frozenset((INSERT, UPDATE, DELETE, TRUNCATE, RELATION))
OPEN_BYTES: Final = 4 * 1024 * 1024  # of one transaction in memory
OPEN_ROWS: Final = 10_000
WHOLE_BYTES: Final = 32 * 1024 * 1024  # of one that is stored in one step
WHOLE_ROWS: Final = 100_000
_SIZE: Final = struct.Struct(">I")


@dataclass(slots=True)
class CommittedTransaction:
    """A committed transaction."""

    commit: int  # LSN of its commit
    xid: int
    time: int  # microseconds since 1970
    total: int = 0  # changes of captured tables


@dataclass(slots=True)
class RowRun:
    """Changes of one table, all of one shape, in order."""

    relation: Relation
    payloads: list[bytes] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of each change in its transaction, from 1
    transactions: list[CommittedTransaction] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # where each transaction begins


@dataclass(slots=True)
class Truncated:
    """A table was emptied."""

    relation: Relation
    number: int
    transaction: CommittedTransaction


class Spill:
    """The messages of a large transaction in a file. Blocking."""

    def __init__(self) -> None:
        self._file: IO[bytes] = TemporaryFile()  # noqa: SIM115  # closed by `close`

    def write(self, payloads: list[bytes]) -> None:
        """Add messages."""
        self._file.write(b"".join(part for p in payloads for part in (_SIZE.pack(len(p)), p)))

    def rewind(self) -> None:
        """Read from the first message on."""
        self._file.seek(0)

    def read(self, rows: int, size: int) -> list[bytes]:
        """The next messages: about so many, or so many bytes; none at the end."""
        found: list[bytes] = []
        while len(found) < rows and size > 0:
            head = self._file.read(_SIZE.size)
            if not head:
                break
            payload = self._file.read(_SIZE.unpack(head)[0])
            size -= len(payload)
            found.append(payload)
        return found

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


class TransactionCollector:
    """Fed with payloads; gives whole transactions. `captured` says which relations are wanted."""

    def __init__(self, captured: Callable[[Relation], bool], *, whole: bool = False) -> None:
        self._captured = captured
        self._limits = (WHOLE_ROWS, WHOLE_BYTES) if whole else (OPEN_ROWS, OPEN_BYTES)
        self._relations: dict[int, Relation | None] = {}
        self._wanted: set[int] = set()  # relations that are captured, also ahead of `_relations`
        self._current: dict[int, RowRun] = {}
        self._runs: list[RowRun | Truncated] = []
        self._open: list[bytes] = []
        self._open_bytes = 0
        self._begun: CommittedTransaction | None = None
        self._spilled: int | None = None  # its changes that are in the file; None: there is none
        self._number = 0
        self.rows = 0  # changes of whole transactions that wait to be taken
        self.bytes = 0  # of messages that wait to be taken
        self.upto = 0  # everything before this was fed

    @property
    def in_transaction(self) -> bool:
        return self._begun is not None

    @property
    def is_large(self) -> bool:
        """Whether the open transaction should be moved to a file now."""
        rows, size = self._limits
        return self._open_bytes > size or len(self._open) > rows

    def feed(self, payload: bytes) -> bool:
        """Take a message; true if it ended a transaction."""
        kind = payload[0]
        if kind in _KEPT:
            if self._begun is None:
                if kind != RELATION:
                    raise LogUnreadable("the server sent a change outside of a transaction")
                self._relation(payload)
                return False
            self._open.append(payload)
            self._open_bytes += len(payload)
        elif kind == BEGIN:
            commit, time, xid = parse_begin(payload)
            self._begun = CommittedTransaction(commit, xid, time)
            self._number, self._spilled = 0, None
        elif kind == COMMIT:
            _, end, _ = parse_commit(payload)
            self._end(end)
            return True
        return False

    def _end(self, end: int) -> None:
        transaction = self._begun
        if transaction is None:
            raise LogUnreadable("the server sent a commit without its transaction")
        if self._spilled is None:
            transaction.total = self._count(self._open)
            self._distribute(self._open, transaction)
            self.bytes += self._open_bytes
            self._open, self._open_bytes, self._begun = [], 0, None
        self.upto = end

    # -- large transactions ---------------------------------------------------------------

    def spill(self) -> list[bytes]:
        """Hand out what the open transaction has so far, to be kept in a file."""
        part, self._open, self._open_bytes = self._open, [], 0
        self._spilled = (self._spilled or 0) + self._count(part)
        return part

    def begin_replay(self) -> None:
        """All of the ended transaction is in the file: it will come back by `replay`."""
        self._ended().total = self._spilled or 0

    def replay(self, payloads: list[bytes]) -> None:
        """Take messages of the ended transaction again, from the file."""
        self._distribute(payloads, self._ended())

    def _ended(self) -> CommittedTransaction:
        if self._begun is None:
            raise LogUnreadable("no transaction was moved to a file")
        return self._begun

    def end_replay(self) -> None:
        """The file is at its end."""
        self._begun, self._spilled = None, None

    # -- runs -----------------------------------------------------------------------------

    def take(self) -> list[RowRun | Truncated]:
        """The runs so far, in order."""
        runs, self._runs, self._current, self.rows, self.bytes = self._runs, [], {}, 0, 0
        return runs

    def _relation(self, payload: bytes) -> None:
        relation = self._described(payload)
        self._current.pop(relation.oid, None)
        self._relations[relation.oid] = relation if relation.oid in self._wanted else None

    def _described(self, payload: bytes) -> Relation:
        relation = parse_relation(payload)
        if self._captured(relation):
            self._wanted.add(relation.oid)
        else:
            self._wanted.discard(relation.oid)
        return relation

    def _known(self, oid: int) -> Relation | None:
        try:
            return self._relations[oid]
        except KeyError:
            raise LogUnreadable(
                f"the server sent a change of table {oid} before its description"
            ) from None

    def _count(self, payloads: list[bytes]) -> int:
        """How many changes are of captured tables."""
        count, wanted, number = 0, self._wanted, int.from_bytes
        for payload in payloads:
            kind = payload[0]
            if kind in _ROWS:
                count += number(payload[1:5], "big") in wanted
            elif kind == RELATION:
                self._described(payload)
            else:
                count += sum(oid in wanted for oid in parse_truncate(payload)[1])
        return count

    def _truncated(self, payload: bytes) -> Iterator[Relation]:
        for oid in parse_truncate(payload)[1]:
            relation = self._known(oid)
            if relation is not None:
                yield relation

    def _distribute(self, payloads: list[bytes], transaction: CommittedTransaction) -> None:
        current, number, from_bytes = self._current, self._number, int.from_bytes
        before = number
        last: dict[int, RowRun] = {}  # runs that know of this transaction
        for payload in payloads:
            kind = payload[0]
            if kind in _ROWS:
                oid = from_bytes(payload[1:5], "big")
                run = last.get(oid)
                if run is None:
                    run = current.get(oid) or self._new_run(oid)
                    if run is None:
                        continue
                    last[oid] = run
                    if not run.transactions or run.transactions[-1] is not transaction:
                        run.transactions.append(transaction)
                        run.starts.append(len(run.payloads))
                number += 1
                run.payloads.append(payload)
                run.numbers.append(number)
            elif kind == RELATION:
                self._relation(payload)
                last.pop(from_bytes(payload[1:5], "big"), None)
            else:
                for relation in self._truncated(payload):
                    number += 1
                    self._runs.append(Truncated(relation, number, transaction))
                    current.pop(relation.oid, None)
                    last.pop(relation.oid, None)
        self.rows += number - before
        self._number = number

    def _new_run(self, oid: int) -> RowRun | None:
        relation = self._known(oid)
        if relation is None:
            return None
        run = self._current[oid] = RowRun(relation)
        self._runs.append(run)
        return run
