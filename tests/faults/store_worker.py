"""Writers of an event store that are killed, and that repeat what they do not know to be stored.

A writer notes what it is about to append in a file of its own before it does so. Whoever continues
after a kill or a lost answer repeats that append with the same id, until it knows what came of it.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream import ANY, NEW, Append, EventStore
from millstream.errors import AggregateNotFound, MillstreamError, VersionConflict
from tests.faults.ledger import EVENTS, Account, events_of

if TYPE_CHECKING:
    from tests.faults.worker import Worker

__all__ = ["SNAPSHOT_EVERY", "append_to_store"]

SNAPSHOT_EVERY: Final = 20
PAUSE: Final = 0.1
TRIES: Final = 10_000  # of one append, a pause apart: longer than any outage of a run
HOT_SECONDS: Final = 4  # for which writers meet at the same aggregates
COLD: Final = 40
KINDS: Final = ("expected", "expected", "any", "new", "transfer", "transfer", "change", "load")


class Journal:
    """What a writer is about to append, in a file that survives it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def left(self) -> dict[str, Any] | None:
        """What an earlier life has not finished."""
        return json.loads(self._path.read_bytes()) if self._path.exists() else None

    def begin(self, plan: dict[str, Any]) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(plan))
        fresh.replace(self._path)

    def end(self) -> None:
        self._path.unlink(missing_ok=True)


@dataclass
class _Writer:
    worker: Worker
    store: EventStore
    number: int
    journal: Journal

    # -- what to do next --------------------------------------------------------------------

    def _aggregate(self) -> str:
        chance = self.worker.chance
        if chance.random() < 0.6:
            age = time.monotonic_ns() // (HOT_SECONDS * 1_000_000_000)
            return f"hot.{chance.randrange(2)}.{age}"
        return f"cold.{chance.randrange(COLD)}"

    async def _plan(self, name: str) -> dict[str, Any] | None:
        """An append as it is noted in the journal; None when the writer has only read."""
        chance = self.worker.chance
        kind, id = chance.choice(KINDS), self._aggregate()
        plan = {"op": name, "kind": kind, "own": chance.random() < 0.6}
        count = chance.choice((1, 1, 2, 3))
        if kind in ("new", "any", "change"):
            return {**plan, "parts": [[id, None if kind == "change" else kind, count]]}
        version = await self._load(f"{name}r", id)
        if kind == "load" or version is None:
            return None
        parts: list[list[Any]] = [[id, version or "new", count]]
        if kind == "transfer":
            other = self._aggregate()
            if other == id:
                return None
            parts.append([other, "any", count])
        return {**plan, "parts": parts}

    # -- doing it ---------------------------------------------------------------------------

    async def run(self) -> None:
        worker = self.worker
        left = self.journal.left()
        if left is not None:
            await self._until_known(left, left["tries"] + 1)
        for number in range(10**9):
            if worker.stopping.is_set():
                return
            plan = await self._plan(f"{worker.name}.{worker.plan['life']}.{self.number}.{number}")
            if plan is not None:
                await self._until_known(plan, 1)
            await worker.rest(worker.plan["pace"] * worker.chance.random() * 2)

    async def _until_known(self, plan: dict[str, Any], first: int) -> None:
        """Append; if it has an id of its own, again and again until the outcome is known."""
        for attempt in range(first, first + TRIES):
            if plan["own"]:
                self.journal.begin({**plan, "tries": attempt})
            if await self._attempt(plan):
                break
            await asyncio.sleep(PAUSE)
            if not plan["own"]:
                return
        self.journal.end()

    async def _attempt(self, plan: dict[str, Any]) -> bool:
        note, op = self.worker.history.note, plan["op"]
        note("append", **plan)
        try:
            done = await self._append(plan)
        except VersionConflict as error:
            note("conflict", op=op, id=error.id, actual=error.actual)
        except MillstreamError as error:
            note("unknown", op=op, error=f"{type(error).__name__}: {error}")
            return False
        else:
            note("ok", op=op, **done)
        return True

    async def _append(self, plan: dict[str, Any]) -> dict[str, Any]:
        op, own, parts = plan["op"], plan["own"], plan["parts"]
        names = [f"{op}:{part}" if own else None for part in range(len(parts))]
        if plan["kind"] == "change":
            return await self._change(op, parts[0], names[0])
        appends = [
            Append(
                id,
                events_of(op, part, count, out=part < len(parts) - 1),
                {"any": ANY, "new": NEW}.get(expected, expected),
                append_id=names[part],
            )
            for part, (id, expected, count) in enumerate(parts)
        ]
        if len(appends) > 1:
            receipts = await self.store.append_all(appends)
        else:
            one = appends[0]
            known = {} if one.append_id is None else {"append_id": one.append_id}
            receipts = [await self.store.append(one.id, one.events, one.expected, **known)]
        return {"receipts": [[r.first_version, r.version, r.offset] for r in receipts]}

    async def _change(self, op: str, part: list[Any], name: str | None) -> dict[str, Any]:
        id, _, count = part
        known = {} if name is None else {"append_id": name}
        change = self.store.change(id, tries=20, **known)
        async with change as account:
            if int(op.rpartition(".")[2]) % 2:
                assert account.balance is not None  # a conflict, if it has changed by then
            account.deposit(events_of(op, 0, count, out=False))
        result = change.result
        assert result is not None
        version = result.version
        receipt = [version - count + 1, version, result.offset]
        return {"receipts": [receipt], "state": result.state.facts}

    async def _load(self, op: str, id: str) -> int | None:
        note = self.worker.history.note
        note("read", op=op, id=id)
        try:
            loaded = await self.store.load(id)
        except AggregateNotFound:
            note("read-ok", op=op, version=0, state=[0, 0, 0])
            return 0
        except MillstreamError as error:
            note("unknown", op=op, error=f"{type(error).__name__}: {error}")
            await self.worker.rest(PAUSE)
            return None
        note("read-ok", op=op, version=loaded.version, state=loaded.state.facts)
        return loaded.version


async def append_to_store(worker: Worker) -> None:
    """Several writers in one process; some share a store and what it remembers."""
    count = worker.plan["writers"]
    stores = [
        await worker.mill.event_store(
            worker.plan["store"], Account, events=EVENTS, snapshot_every=SNAPSHOT_EVERY
        )
        for _ in range(count - 1)
    ]
    folder = Path(worker.plan["folder"])
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            journal = Journal(folder / f"{worker.name}-{number}.journal")
            writer = _Writer(worker, stores[number % len(stores)], number, journal)
            group.create_task(writer.run())
