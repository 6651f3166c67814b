"""A running member: renews its lease, takes its share of partitions, releases the rest.

Why at most one member hands out a partition's events:
1. A member's record is renewed by compare-and-set. Others may end it, by compare-and-set as well,
   when they saw no change for the complete lease on their own clock.
2. A member whose renewals are not confirmed stops after two thirds of the lease, counted
   from when the last confirmed one was sent: always before 1 can happen.
3. A partition is taken only when its record names no owner, or a member whose record is ended.
4. Taking raises the epoch; a member that writes with an old view is refused and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from millstream.deadline import Deadline, now_ns
from millstream.errors import (
    ConnectionClosed,
    DataLoss,
    MillstreamError,
    TopicNotFound,
    WrongSequence,
)
from millstream.events.event import Partition
from millstream.events.start import Start
from millstream.messaging.groups.assignment import OWN_SHARE, Liveness, assign
from millstream.messaging.groups.context import MemberContext
from millstream.messaging.groups.holding import Holding, HoldingState
from millstream.messaging.groups.records import MemberRecord, PartitionRecord
from millstream.messaging.groups.settings import LEASE_SECONDS_MIN
from millstream.messaging.groups.store import RECORDS, UNSURE, Stored
from millstream.wire.aio.interest_hold import hold_on
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.pull_consumer import Signal
from millstream.wire.protocol import unique_token

__all__ = ["Member", "start_position"]

_log = logging.getLogger("millstream.messaging")

BEATS: Final = 4  # renewals within the time that one lasts: three may be lost
LOOKS: Final = 5  # reads of the records within the shortest lease of the group
PAUSE_SECONDS: Final = 0.05
# For the last writes of a member that stops immediately; work they miss is repeated by others.
LAST_SECONDS: Final = 2.0
# Replicas may answer with an old snapshot, so after a nudge the records are read twice.
SECOND_LOOK_SECONDS: Final = 0.2
# A restarting server answers "not found" until it has read its streams; after this it is true.
RECOVERY_SECONDS: Final = 10.0


async def start_position(jetstream: JetStream, stream: str, start: Start) -> int:
    """The offset at which a new group starts to read a stream."""
    if start.policy == "by_start_sequence":
        return start.offset
    if start.policy == "by_start_time":
        return await jetstream.sequence_at(stream, start.rfc3339 or "")
    state = (await jetstream.stream_info(stream)).state
    if start.policy == "new":
        return state.last_seq + 1
    return max(1, state.last_seq if start.policy == "last" else state.first_seq)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


class Member:
    """One member from joining to leaving."""

    def __init__(self, context: MemberContext, partitions: Sequence[Partition], name: str) -> None:
        self.context = context
        self.name = name
        self.id = ""
        self.holdings: dict[int, Holding] = {}
        self._partitions = {partition.number: partition for partition in partitions}
        self._store = context.store
        self._lease = context.lease
        self._connection = context.jetstream.connection
        self._record = MemberRecord(name=name, lease=context.settings.lease, since_ns=now_ns())
        self._revision = 0
        self._joined = False
        self._beating = asyncio.Lock()
        self._balancing = asyncio.Lock()
        self._renewed = asyncio.Event()
        self._liveness = Liveness()
        self._alive: frozenset[str] = frozenset()
        self._news = Signal()
        self._shortest = context.settings.lease  # of all members: their deaths must be noticed
        self._look_all = Deadline(0)  # when it has passed, the partitions are read as well
        self._check_logs = False
        self._releases: dict[asyncio.Task[None], Holding] = {}

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set; then let handlers end, commit and leave."""
        await self._join(self._connection.settings.request_timeout)
        interest = self._store.listen(self._news.set)
        self._connection.on_connected.append(self._reconnected)
        loops: list[asyncio.Future[None]] = [
            asyncio.create_task(loop())
            for loop in (self._beat, self._guard, self._look, self._read, self._commit)
        ]
        stop = asyncio.create_task(_wait(stopping))
        failed = self.context.workers.failed
        self._connection.on_closed.append(self._closed)
        try:
            self._connection.check_open()
            await asyncio.wait([*loops, stop, failed], return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                leaving = asyncio.create_task(self._leave_gently())
                loops.append(leaving)
                await asyncio.wait([*loops, failed], return_when=asyncio.FIRST_COMPLETED)
            for task in (*loops, failed):
                if task.done():
                    task.result()
        finally:
            self._connection.on_connected.remove(self._reconnected)
            self._connection.on_closed.remove(self._closed)
            self._store.stop_listening(interest)
            for task in (*loops, stop):
                task.cancel()
            await asyncio.gather(*loops, stop, return_exceptions=True)
            await self._leave_now()
            failed.cancel()

    # -- being alive ----------------------------------------------------------------------

    async def _join(self, seconds: float) -> None:
        """Start as a new member: an id is never used again after its end."""
        self.id = f"{self.name}-{unique_token(8)}"
        self._revision = 0
        deadline = Deadline(seconds)
        while not await self._renew():
            if deadline.passed:
                raise MillstreamError(f"member '{self.name}' could not join the group in time")
            await asyncio.sleep(PAUSE_SECONDS)
        self._joined = True
        self._store.nudge()
        self._news.set()

    async def _renew(self) -> bool:
        """Renew the lease; False when it failed or it is unknown whether it worked."""
        async with self._beating:
            sent = self._lease.clock()
            try:
                if not await self._write_record():
                    return False
            except UNSURE as error:
                self._connection.check_open()
                _log.debug("member %s: lease not renewed yet: %s", self.id, error)
                return False
            self._lease.renewed(sent)
            self._renewed.set()
            self.context.workers.resume()
            return True

    async def _write_record(self) -> bool:
        """Write this member's record again; False when it was changed or removed."""
        timeout = self.context.settings.lease * OWN_SHARE / BEATS
        try:
            self._revision = await self._store.put_member(
                self.id, self._record, self._revision, timeout
            )
        except WrongSequence:
            # Either another member ended this one, or the answer to a renewal was lost.
            found = await self._store.member(self.id)
            self._joined = self._joined and found is not None
            self._revision = 0 if found is None else found.revision
            return False
        return True

    async def _beat(self) -> None:
        pause = self.context.settings.lease * OWN_SHARE / BEATS
        patience = Deadline(RECOVERY_SECONDS)
        while True:
            try:
                if patience.passed:  # raises when the records were deleted
                    patience = Deadline(RECOVERY_SECONDS)
                    await self.context.jetstream.stream_info(RECORDS)
                renewed = await self._renew()
            except UNSURE as error:
                self._connection.check_open()
                _log.debug("member %s: it is unknown whether it is alive: %s", self.id, error)
                renewed = False
            if renewed:
                patience = Deadline(RECOVERY_SECONDS)
            if not self._joined:
                await self._join_again()
            await asyncio.sleep(pause if renewed else PAUSE_SECONDS)

    async def _join_again(self) -> None:
        """Others declared this member dead: drop everything, then start as a new one."""
        _log.warning("member %s was declared dead; it joins again", self.id)
        for holding in list(self.holdings.values()):
            holding.close()
        self.holdings.clear()
        # A handler in a thread cannot be stopped; nothing new starts before it has ended.
        await self.context.workers.ended()
        if not self._record.leaving:
            # A broker that is away is waited for as everywhere else.
            await self._join(self._connection.settings.reconnect.give_up_after)

    async def _guard(self) -> None:
        """Cancel handlers before the lease ends when it cannot be renewed."""
        while True:
            if self._lease.valid:
                await asyncio.sleep(self._lease.left())
                continue
            self._renewed.clear()
            _log.warning("member %s: lease not renewed in time, handlers are cancelled", self.id)
            self.context.workers.cancel()
            await self._renewed.wait()

    # -- sharing --------------------------------------------------------------------------

    async def _look(self) -> None:
        wait, nudged, patience = 0.0, False, Deadline(RECOVERY_SECONDS)
        while True:
            second = nudged
            nudged = await self._news.wait(wait)
            if nudged or second:
                self._look_all = Deadline(0)
            try:
                if self._joined:
                    async with self._balancing:
                        await self._look_once()
                    patience = Deadline(RECOVERY_SECONDS)
            except TopicNotFound:
                if patience.passed:
                    raise
            except UNSURE as error:
                self._connection.check_open()
                self._look_all = Deadline(0)  # the partitions to take may not be ours yet
                _log.debug("member %s: could not read the records of the group: %s", self.id, error)
            except WrongSequence:
                self._look_all = Deadline(0)  # another member was faster: read again
            wait = self._shortest / LOOKS
            if nudged:
                wait = min(SECOND_LOOK_SECONDS, wait)

    async def _look_once(self) -> None:
        if self._check_logs:
            for holding in list(self.holdings.values()):
                await holding.check_log()
            self._check_logs = False
        members = await self._living()
        alive = frozenset(members)
        if alive == self._alive and not self._look_all.passed:
            return
        # Owners are read before members: an owner that is not a member then has ended.
        partitions = await self._store.partitions()
        members = await self._living()
        self._alive = frozenset(members)
        self._look_all = Deadline(self.context.settings.lease)
        await self._balance(partitions, members)

    async def _living(self) -> dict[str, Stored[MemberRecord]]:
        """The members that are alive; those that are not are ended."""
        members = await self._store.members()
        leases = [stored.record.lease for stored in members.values()]
        self._shortest = max(LEASE_SECONDS_MIN, min(leases, default=self._record.lease))
        others = {
            member: (stored.revision, stored.record.lease)
            for member, stored in members.items()
            if member != self.id
        }
        if not self._lease.valid:
            self._liveness = Liveness()  # a member that cannot renew must not blame others for it
            return members
        self._liveness.look(others, self._lease.clock())
        for member, revision in self._liveness.dead():
            timeout = self.context.settings.lease
            try:
                await self._store.end_member(member, revision, timeout)
            except WrongSequence:
                continue  # it lives, or another member has ended it
            _log.warning("member %s did not renew its lease; its partitions are taken over", member)
            del members[member]
            self._store.nudge()
        return members

    async def _balance(
        self,
        partitions: dict[int, Stored[PartitionRecord]],
        members: dict[str, Stored[MemberRecord]],
    ) -> None:
        owners = {number: stored.record.owner for number, stored in partitions.items()}
        staying = sorted({m for m, s in members.items() if not s.record.leaving} | {self.id})
        if self._record.leaving:
            staying.remove(self.id)
        wanted = assign(list(self._partitions), staying, owners)
        for number, holding in list(self.holdings.items()):
            if number in partitions and not holding.adopt(partitions[number]):
                self._drop(holding)
            elif wanted.get(number) != self.id and holding.state is HoldingState.OPEN:
                self._release_later(holding)
        for number, stored in partitions.items():
            unknown = stored.record.owner == self.id and number not in self.holdings
            if unknown and wanted.get(number) != self.id:
                # A take failed after it was stored, and by now it is another member's share.
                await self._disown(number, stored)
        mine = [n for n, m in wanted.items() if m == self.id and n not in self.holdings]
        free = [n for n in mine if owners.get(n, "") not in members or owners[n] == self.id]
        takes = [self._take(number, partitions.get(number)) for number in free]
        # Wait for all of them: a take that kept running could be repeated by the next round.
        errors = [e for e in await asyncio.gather(*takes, return_exceptions=True) if e is not None]
        if errors:  # raise one that the next round cannot fix first
            raise min(errors, key=lambda error: isinstance(error, (*UNSURE, TopicNotFound)))

    async def _take(self, number: int, stored: Stored[PartitionRecord] | None) -> None:
        """Become the owner of a free partition, and continue at the last owner's position."""
        partition, jetstream = self._partitions[number], self.context.jetstream
        hold = await hold_on(
            *(jetstream, partition.stream, "group", self._store.group), known=stored is not None
        )
        if stored is None:
            offset = await start_position(jetstream, partition.stream, self.context.settings.start)
            stored = Stored(0, PartitionRecord(position=(offset, 0)))
        before = stored.record
        died = before.owner not in ("", self.id)
        if died and await self._store.member(before.owner) is not None:
            return  # the snapshot was old: it is alive
        # We are the owner already: the answer to a take was lost. That take counted the death.
        trying = before.trying if before.owner else None
        record = msgspec.structs.replace(
            before,
            owner=self.id,
            epoch=before.epoch + 1,
            deaths=before.deaths + died,
            trying=trying,
            strikes=before.strikes + died if trying else 0,
        )
        timeout = self.context.settings.lease
        try:
            revision = await self._store.put_partition(number, record, stored.revision, timeout)
        except WrongSequence:
            self._look_all = Deadline(0)
            return  # another member was faster, or our answer was lost: the next round shows which
        if not self._joined or self.id != record.owner:
            return  # declared dead in the meantime
        holding = Holding(self.context, partition, Stored(revision, record), hold)
        self.holdings[number] = holding
        try:
            await holding.open()
        except (*UNSURE, TopicNotFound):
            self._drop(holding)
            raise

    async def _disown(self, number: int, stored: Stored[PartitionRecord]) -> None:
        """Free a partition that is recorded as ours and that we do not hold."""
        record = msgspec.structs.replace(stored.record, owner="")
        timeout = self.context.settings.lease
        try:
            await self._store.put_partition(number, record, stored.revision, timeout)
        except WrongSequence:
            self._look_all = Deadline(0)  # the snapshot was old
        else:
            self._store.nudge()

    def _drop(self, holding: Holding) -> None:
        holding.close()
        if self.holdings.get(holding.partition) is holding:
            del self.holdings[holding.partition]

    def _release_later(self, holding: Holding) -> None:
        task = asyncio.create_task(self._release(holding))
        self._releases[task] = holding
        task.add_done_callback(self._released)

    def _released(self, task: asyncio.Task[None]) -> None:
        self._releases.pop(task, None)
        failed = self.context.workers.failed
        if not task.cancelled() and (error := task.exception()) and not failed.done():
            failed.set_exception(error)

    async def _release(self, holding: Holding) -> None:
        """Let the handlers of a partition end, commit, and let others take it."""
        await holding.drain()
        while holding.state is HoldingState.DRAINING:
            try:
                await holding.commit(release=True)
                break
            except MillstreamError as error:
                if self._connection.closed:
                    break
                _log.info("partition %d not released yet: %s", holding.partition, error)
                await asyncio.sleep(PAUSE_SECONDS)
        self._drop(holding)
        self._store.nudge()

    # -- working --------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            for holding in list(self.holdings.values()):
                await holding.learn()
                holding.fill()
            await self.context.signal.wait()

    async def _commit(self) -> None:
        while True:
            await asyncio.sleep(self.context.settings.commit_every)
            await asyncio.gather(*(self._commit_one(h) for h in list(self.holdings.values())))

    async def _commit_one(self, holding: Holding) -> None:
        try:
            if not await holding.commit():
                self._drop(holding)
                self._news.set()
        except DataLoss:
            raise
        except MillstreamError as error:
            self._connection.check_open()
            _log.info("position of partition %d not committed: %s", holding.partition, error)

    def _reconnected(self) -> None:
        self._check_logs = True
        self._news.set()

    # -- leaving --------------------------------------------------------------------------

    def _closed(self) -> None:
        """The connection was closed for good: nothing can be committed any more."""
        self.hold()
        failed = self.context.workers.failed
        if not failed.done():
            failed.set_exception(ConnectionClosed("the connection was closed"))

    def hold(self) -> None:
        """Hand out nothing more; running handlers may end."""
        for holding in self.holdings.values():
            holding.hold()

    async def _leave_gently(self) -> None:
        """Announce it first, so that released partitions are taken over immediately."""
        self._record = msgspec.structs.replace(self._record, leaving=True)
        await self._renew()
        self._store.nudge()
        async with self._balancing:  # partitions that are being taken are released as well
            for holding in list(self.holdings.values()):
                if holding not in self._releases.values():
                    self._release_later(holding)
        while self._releases:
            await asyncio.wait(list(self._releases))

    async def _leave_now(self) -> None:
        """Cancel handlers, commit what can be committed in a short time, and leave."""
        for task in self._releases:
            task.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)
        self.hold()
        self.context.workers.cancel()
        with contextlib.suppress(TimeoutError, MillstreamError):
            async with asyncio.timeout(LAST_SECONDS):
                await self.context.workers.ended()
                await asyncio.gather(*(h.commit(release=True) for h in self.holdings.values()))
                await self._end()
        for holding in list(self.holdings.values()):
            self._drop(holding)

    async def _end(self) -> None:
        if not self._joined:
            return
        try:
            await self._store.end_member(self.id, self._revision, LAST_SECONDS)
        except WrongSequence:  # a renewal was in flight when it was cancelled
            found = await self._store.member(self.id)
            if found is not None:
                await self._store.end_member(self.id, found.revision, LAST_SECONDS)
        self._store.nudge()
