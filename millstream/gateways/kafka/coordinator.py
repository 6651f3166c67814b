"""All groups of consumers: requests that wait, timers, and what is stored before it is answered."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from millstream.deadline import now_ns
from millstream.errors import MillstreamError, PayloadTooLarge
from millstream.failure_log import FailureLog
from millstream.gateways.kafka.group import ConsumerGroup
from millstream.gateways.kafka.group_members import (
    CONSUMER,
    ID_BYTES_MAX,
    Caller,
    GroupAnswer,
    GroupBounds,
    GroupState,
    JoinAsk,
    Joined,
    PauseWatch,
    SyncAsk,
    Synced,
)
from millstream.gateways.kafka.group_store import (
    Committed,
    GroupTable,
    GroupTakenOver,
    KeptGroup,
    TopicPartition,
)
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.mill import Mill

__all__ = ["Coordinator", "expired_offsets", "now_ms"]

_log = logging.getLogger("millstream.gateways.kafka")

_TICK_SECONDS: Final = 0.5
_PAUSE_SECONDS: Final = 2.0  # between two ticks: the process was paused
_RELOAD_SECONDS: Final = 0.5

R = TypeVar("R", Joined, Synced)
Changes = Mapping[TopicPartition, Committed | None]


@dataclass(slots=True, eq=False)
class _Held:
    """A group, and what is stored of it."""

    name: str
    group: ConsumerGroup
    kept: KeptGroup
    planned: float = math.inf  # when its timers are looked at


def now_ms() -> int:
    """The wall-clock time that is kept with offsets."""
    return now_ns() // 1_000_000


class Coordinator:
    """The groups of this gateway. `start` before it is asked anything."""

    def __init__(
        self,
        mill: Mill,
        limits: GroupBounds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or GroupBounds()
        # Set with an error when the timers ended.
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._store = GroupTable(mill)
        self._clock = clock
        self._groups: dict[str, _Held] = {}
        self._loading: set[str] = set()
        self._heap: list[tuple[float, int, _Held]] = []
        self._numbers = itertools.count()
        self._wake = asyncio.Event()
        self._wake_at = math.inf
        self._watch = PauseWatch(_PAUSE_SECONDS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = FailureLog(_log)

    async def start(self) -> None:
        """Load all groups: their members continue, if they were not away for too long."""
        await self._store.start()
        for name, kept in (await self._store.load_all()).items():
            self._hold(name, kept)
        for loop in (self._run_timers, self._run_cleanup):
            task = self._start(loop())
            task.add_done_callback(self._loop_ended)

    async def stop(self) -> None:
        """Answer all that wait, and let writes end."""
        held = list(self._groups.values())
        for one in held:
            one.group.close(ErrorCode.coordinator_not_available)
            self._settle(one)
        for one in held:
            await one.kept.drain()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._groups.clear()

    def __len__(self) -> int:
        return len(self._groups)

    def status(self) -> dict[str, Any]:
        """For `gateway status`."""
        groups = [held.group for held in self._groups.values()]
        return {
            "groups": len(groups),
            "groups_with_members": sum(1 for group in groups if group.members),
            "members": sum(len(group.members) for group in groups),
        }

    # -- what members ask -----------------------------------------------------------------

    async def join(self, name: str, ask: JoinAsk) -> Joined:
        """A client joins a group; answered when the next generation begins."""
        error = self._refusal(name)
        if error is not ErrorCode.none:
            return Joined(error, ask.member_id)
        held = self._groups.get(name)
        if held is None:
            if ask.member_id:
                return Joined(ErrorCode.unknown_member_id, ask.member_id)
            if len(self._groups) >= self.limits.max_groups:
                return Joined(self._too_many(name), "")
            held = self._hold(name, self._store.new(name))
        return await self._wait(held, lambda token: held.group.join(ask, token, self._clock()))

    async def sync(self, name: str, ask: SyncAsk) -> Synced:
        """A member asks for its assignment; answered when the leader's are stored."""
        held, error = self._find(name)
        if held is None:
            return Synced(error)
        return await self._wait(held, lambda token: held.group.sync(ask, token, self._clock()))

    def heartbeat(self, name: str, who: Caller) -> ErrorCode:
        """A member is alive."""
        held, error = self._find(name)
        if held is None:
            return error
        error = held.group.heartbeat(who, self._clock())
        self._plan(held)
        return error

    def leave(self, name: str, member_id: str, instance: str | None) -> ErrorCode:
        """A member leaves."""
        held, error = self._find(name)
        if held is None:
            return error
        error = held.group.leave(member_id, instance, self._clock())
        self._settle(held)
        return error

    # -- offsets --------------------------------------------------------------------------

    def commit_refusal(self, name: str, who: Caller) -> ErrorCode:
        """Why offsets are not accepted from a caller; `none` if they are."""
        error = self._refusal(name)
        if error is not ErrorCode.none:
            return error
        held = self._groups.get(name)
        if held is not None:
            error = held.group.commit_refusal(who, self._clock())
            self._plan(held)
            return error
        if who.generation >= 0:
            return ErrorCode.illegal_generation
        if len(self._groups) >= self.limits.max_groups:
            return self._too_many(name)
        return ErrorCode.none

    async def commit(self, name: str, who: Caller, changes: Changes) -> ErrorCode:
        """Set offsets of a group; returns when they are stored, or refused."""
        error = self.commit_refusal(name, who)
        if error is not ErrorCode.none:
            return error
        held = self._groups.get(name) or self._hold(name, self._store.new(name))
        held.group.committing(who, 1, self._clock())
        try:
            return await self._change(held, changes)
        finally:
            held.group.committing(who, -1, self._clock())
            self._plan(held)

    def offsets(self, name: str) -> Mapping[TopicPartition, Committed] | None:
        """The stored offsets of a group; None: they cannot be given now, but soon."""
        if name in self._loading:
            return None
        held = self._groups.get(name)
        return {} if held is None else held.kept.offsets

    async def delete_offsets(self, name: str, parts: Iterable[TopicPartition]) -> ErrorCode:
        """Remove offsets of a group; returns when that is stored."""
        held, _ = self._find(name)
        if held is None:
            return ErrorCode.group_id_not_found
        known = held.kept.offsets
        return await self._change(held, {part: None for part in parts if part in known})

    # -- groups ---------------------------------------------------------------------------

    def find(self, name: str) -> ConsumerGroup | None:
        """A group, to look at."""
        held = self._groups.get(name)
        return None if held is None else held.group

    def all(self) -> list[tuple[str, ConsumerGroup]]:
        """All groups with their names, to look at."""
        return [(name, held.group) for name, held in self._groups.items()]

    async def delete(self, name: str) -> ErrorCode:
        """Delete a group without members, and its offsets."""
        held, _ = self._find(name)
        if held is None:
            loading = name in self._loading
            return (
                ErrorCode.coordinator_load_in_progress if loading else ErrorCode.group_id_not_found
            )
        if held.group.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        if held.group.state is not GroupState.EMPTY:
            return ErrorCode.non_empty_group
        held.group.close(ErrorCode.coordinator_not_available)
        self._settle(held)
        error = await self._written(held, held.kept.delete())
        if self._groups.get(name) is held:
            if error is ErrorCode.none:
                del self._groups[name]
            else:
                held.group.reopen()
                self._settle(held)
        return error

    # -- inside ---------------------------------------------------------------------------

    def _refusal(self, name: str) -> ErrorCode:
        if not name or len(name.encode()) > ID_BYTES_MAX:
            return ErrorCode.invalid_group_id
        if name in self._loading:
            return ErrorCode.coordinator_load_in_progress
        return ErrorCode.none

    def _find(self, name: str) -> tuple[_Held | None, ErrorCode]:
        """A group, or what members of a group that is not there are answered."""
        if name in self._loading:
            return None, ErrorCode.coordinator_load_in_progress
        return self._groups.get(name), ErrorCode.unknown_member_id

    def _too_many(self, name: str) -> ErrorCode:
        self._failures.warn(
            None,
            "group %r is refused: there are %d groups already, the most that are allowed",
            name,
            len(self._groups),
        )
        return ErrorCode.policy_violation

    def _hold(self, name: str, kept: KeptGroup) -> _Held:
        held = _Held(name, ConsumerGroup(self.limits, kept.record, self._clock()), kept)
        self._groups[name] = held
        self._plan(held)
        return held

    async def _wait(self, held: _Held, ask: Callable[[asyncio.Future[R]], None]) -> R:
        token: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        ask(token)
        self._settle(held)
        try:
            return await token
        except asyncio.CancelledError:
            held.group.gone(token, self._clock())
            self._settle(held)
            raise

    def _settle(self, held: _Held) -> None:
        """Do what the group wants done."""
        for effect in held.group.take():
            if isinstance(effect, GroupAnswer):
                token: Any = effect.token
                if not token.done():
                    token.set_result(effect.result)
            else:
                record = effect.record
                if not record.members:
                    record = replace(record, empty_since_ms=now_ms())
                self._start(self._keep(held, effect.number, held.kept.put(record)))
        self._plan(held)
        unused = held.group.is_unused and not held.kept.is_stored
        if unused and self._groups.get(held.name) is held:
            del self._groups[held.name]  # clients asked for an id, and did not come back

    async def _keep(self, held: _Held, number: int, write: Awaitable[None]) -> None:
        error = await self._written(held, write)
        held.group.stored(number, error, self._clock())
        self._settle(held)

    async def _change(self, held: _Held, changes: Changes) -> ErrorCode:
        error = ErrorCode.none
        if changes:
            error = await self._written(held, held.kept.commit(changes))
        self._settle(held)
        return error

    async def _written(self, held: _Held, write: Awaitable[None]) -> ErrorCode:
        """Wait for a write; the error is what clients are answered."""
        try:
            await write
        except GroupTakenOver:
            self._reload(held)
            return ErrorCode.not_coordinator
        except PayloadTooLarge as error:
            self._failures.warn(None, "group %r cannot be stored: %s", held.name, error)
            return ErrorCode.message_too_large
        except MillstreamError as error:
            self._failures.warn(None, "group %r is not stored now: %s", held.name, error)
            return ErrorCode.coordinator_not_available
        return ErrorCode.none

    def _reload(self, held: _Held) -> None:
        """Another process wrote the group: what it wrote counts."""
        if self._groups.get(held.name) is not held:
            return
        _log.warning("group %r was written by another gateway: it is read again", held.name)
        del self._groups[held.name]
        self._loading.add(held.name)
        held.group.close(ErrorCode.not_coordinator)
        self._settle(held)
        self._start(self._load_again(held.name))

    async def _load_again(self, name: str) -> None:
        while True:
            try:
                kept = await self._store.load(name)
            except MillstreamError as error:
                self._failures.warn(None, "group %r cannot be read now: %s", name, error)
                await asyncio.sleep(_RELOAD_SECONDS)
                continue
            self._loading.discard(name)
            self._settle(self._hold(name, kept))
            return

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    # -- timers ---------------------------------------------------------------------------

    def _plan(self, held: _Held) -> None:
        due = held.group.due
        if due < held.planned:
            held.planned = due
            heapq.heappush(self._heap, (due, next(self._numbers), held))
            if due < self._wake_at:
                self._wake.set()

    async def _run_timers(self) -> None:
        while True:
            self._wake.clear()
            now = self._clock()
            gap = self._watch.seen(now)
            if gap:
                _log.warning("this process was paused for %.1f s: sessions last longer", gap)
                for held in self._groups.values():
                    held.group.shift(gap)
            self._tick(now)
            seconds = None
            self._wake_at = math.inf
            if self._heap:
                self._wake_at = min(self._heap[0][0], now + _TICK_SECONDS)
                seconds = max(0.0, self._wake_at - now)
            else:
                self._watch.rest()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()

    def _tick(self, now: float) -> None:
        due: list[_Held] = []
        while self._heap and self._heap[0][0] <= now:
            end, _, held = heapq.heappop(self._heap)
            if end != held.planned or self._groups.get(held.name) is not held:
                continue  # planned again, earlier; or no group of ours any more
            held.planned = math.inf
            due.append(held)
        for held in due:
            if held.group.due <= now:
                held.group.tick(now)
            self._settle(held)

    # -- what nobody needs any more -------------------------------------------------------

    async def _run_cleanup(self) -> None:
        while True:
            await asyncio.sleep(self.limits.cleanup_interval)
            await self.clean(now_ms())

    async def clean(self, time_ms: int) -> None:
        """Remove offsets that are too old, and groups that have none and nobody."""
        for held in list(self._groups.values()):
            group, kept = held.group, held.kept
            if group.state is GroupState.DEAD:
                continue
            expired = expired_offsets(held.group, kept, time_ms, self.limits.offsets_retention)
            if expired:
                _log.info("group %r: %d offsets have expired", held.name, len(expired))
                await self._change(held, dict.fromkeys(expired))
            empty = group.state is GroupState.EMPTY and not group.members.pending
            if empty and not kept.offsets and not kept.is_busy:
                await self.delete(held.name)


def expired_offsets(
    group: ConsumerGroup, kept: KeptGroup, time_ms: int, retention: float
) -> list[TopicPartition]:
    """The offsets of a group that nobody has used for `retention` seconds.

    Those of a group with members last as long as it has them, unless these read other topics.
    """
    since = 0
    if group.state is GroupState.EMPTY:
        since = kept.record.empty_since_ms
    elif group.state is not GroupState.STABLE or group.protocol_type != CONSUMER:
        return []
    used = group.members.subscribed()
    if used is None:
        return []
    limit = time_ms - int(retention * 1000)
    return [
        part
        for part, one in kept.offsets.items()
        if max(one.time_ms, since) <= limit and part.topic not in used
    ]
