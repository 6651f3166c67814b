"""Ordered groups: members share a partitioned topic, and each key keeps its order."""

from __future__ import annotations

import asyncio
import os
import platform
import re
from collections.abc import Sequence

from millstream.closing import AsyncClosing
from millstream.errors import ConfigError, RequestTimeout, WrongSequence
from millstream.events.event import Partition
from millstream.events.subject import check_name
from millstream.failure_log import check_handler
from millstream.messaging.dead_letters.store import DeadLetterStore, default_dead_letter_topic
from millstream.messaging.groups.admin import GroupAdmin, GroupInfo, ParkedKey
from millstream.messaging.groups.assignment import Lease
from millstream.messaging.groups.context import MemberContext
from millstream.messaging.groups.event import GroupEvent
from millstream.messaging.groups.member import Member, start_position
from millstream.messaging.groups.records import PartitionRecord
from millstream.messaging.groups.settings import GroupSettings
from millstream.messaging.groups.store import GroupStore
from millstream.messaging.groups.workers import GroupCall, GroupHandler, Workers, caller
from millstream.wire.aio.interest_hold import hold_on
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.aio.pull_consumer import Signal

__all__ = ["Group", "GroupEvent", "GroupHandler", "GroupSettings"]


class Group(AsyncClosing):
    """One member of an ordered group. At least once; each key in order, by one member at a time.

    Members may join, leave or die at any time; only the partitions that move pause. An event whose
    handler fails is retried while later events of its key wait; after `max_attempts` its key is
    parked: the event and later ones of the key become dead letters, in order, until the key is
    unparked. Events without a key have no order and are never parked.

    "One at a time" holds while handlers end within a third of the lease when they are cancelled
    (plain functions: on their own) and the process is not frozen in the middle of one. To be
    safe from a frozen process, pass `event.epoch` to the system the handler writes to.
    """

    def __init__(
        self,
        jetstream: JetStream,
        publisher: StreamPublisher,
        topic: str,
        partitions: Sequence[Partition],
        name: str,
        settings: GroupSettings | None = None,
        *,
        member_id: str | None = None,
    ) -> None:
        self.name = check_name("group", name)
        self.topic = topic
        self.settings = settings or GroupSettings()
        self._jetstream = jetstream
        self._publisher = publisher
        self._partitions = partitions
        self._member_name = (
            _default_name() if member_id is None else check_name("member", member_id)
        )
        self._store = GroupStore(jetstream, publisher, topic, name)
        self._admin = GroupAdmin(jetstream, publisher, topic, partitions)
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._member: Member | None = None
        self._opened = False

    def __repr__(self) -> str:
        return f"<Group {self.name} of {self.topic}, partitions {list(self.partitions)}>"

    async def _enter(self) -> None:
        await self.open()

    async def _leave(self, error: BaseException | None) -> None:
        await self.stop()

    async def open(self) -> None:
        """Create the group if it does not exist, starting at `settings.start`; nothing is read.

        An interest topic keeps events for the group from here on. A work queue is refused.
        """
        info = await self._jetstream.stream_info(self._partitions[0].stream)
        await self._store.declare(info.config.get("num_replicas", 1))
        known = await self._store.partitions()
        await asyncio.gather(*(self._create(p, p.number in known) for p in self._partitions))
        self._opened = True

    async def _create(self, partition: Partition, known: bool) -> None:
        stream, number = partition.stream, partition.number
        await hold_on(self._jetstream, stream, "group", self.name, known=known)
        if known:
            return
        offset = await start_position(self._jetstream, stream, self.settings.start)
        record = PartitionRecord(position=(offset, 0))
        try:
            timeout = self._jetstream.connection.settings.request_timeout
            await self._store.put_partition(number, record, 0, timeout)
        except WrongSequence:
            return  # another member was first

    # -- working --------------------------------------------------------------------------

    async def run(self, handler: GroupHandler) -> None:
        """Call the handler for every event of the partitions this member owns, until `stop`.

        When the handler returns, the event is done. When it raises, the event is retried after a
        delay and its key is parked after `max_attempts`; `Reject` makes the event a dead letter
        immediately, and its key continues. Plain functions run in threads.
        """
        check_handler(handler)
        if not self._ended.is_set():
            raise ConfigError(f"this member of group '{self.name}' is already running")
        self._ended.clear()
        self._jetstream.connection.intakes.add(self)
        call, pool = caller(handler, self.settings.concurrency)
        try:
            if not self._opened:
                await self.open()
            if not self._stopping.is_set():
                self._member = self._make_member(call, pool is None)
                await self._member.run(self._stopping)
        finally:
            self._member = None
            self._ended.set()
            if pool is not None:
                pool.shutdown(wait=False)

    def _make_member(self, call: GroupCall, cancellable: bool) -> Member:
        settings = self.settings
        dead = settings.dead_letter or default_dead_letter_topic(self.topic, self.name)
        lease = Lease(settings.lease)
        context = MemberContext(
            self._jetstream,
            self._store,
            DeadLetterStore(self._jetstream, self._publisher, dead, self.name),
            settings,
            lease,
            Workers(settings.concurrency, lease, cancellable),
            Signal(),
            call,
            asyncio.Lock(),
        )
        return Member(context, self._partitions, self._member_name)

    async def stop(self) -> None:
        """Leave gracefully: running handlers finish, positions are committed, others take over.

        In a handler it returns immediately, and the member leaves when the handler has ended.
        """
        self._stopping.set()
        if self._member is not None:
            self._member.hold()
        if self._member is None or not self._member.context.workers.runs_this_task:
            await self._ended.wait()

    async def drain(self, timeout: float | None = None) -> None:
        """Like `stop`, but RequestTimeout when that takes longer than `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self.stop()
        except TimeoutError as error:
            hint = ": handlers were still running when the time was up"
            raise RequestTimeout(self.name, timeout or 0, hint) from error

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions this member owns now."""
        return () if self._member is None else tuple(sorted(self._member.holdings))

    @property
    def member_id(self) -> str:
        """The id under which this member is known; "" while it does not run."""
        return "" if self._member is None else self._member.id

    @property
    def handled(self) -> int:
        """Events that this member has finished since `run` started."""
        return 0 if self._member is None else self._member.context.handled

    # -- state ----------------------------------------------------------------------------

    async def info(self) -> GroupInfo:
        """Members, owners, positions, lag and parked keys."""
        return await self._admin.info(self.name)

    async def parked(self) -> list[ParkedKey]:
        """The keys whose events become dead letters."""
        return await self._admin.parked(self.name)

    async def unpark(self, key: str) -> bool:
        """Hand out the key's next events again; False when it is not parked."""
        return await self._admin.unpark(self.name, key)


def _default_name() -> str:
    """Host and process, as far as they fit into a name."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", platform.node()).strip("-_")[:100] or "member"
    return f"{host}-{os.getpid()}"
