"""Administration of ordered groups: members, positions, lag, parked keys, seek, delete."""

from __future__ import annotations

import asyncio
from builtins import list as builtin_list
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

import msgspec

from millstream.deadline import Deadline, now_ns
from millstream.errors import ConfigError, GroupBusy, GroupNotFound, WrongSequence
from millstream.events.event import Partition, datetime_of, nanoseconds_of
from millstream.events.start import Start
from millstream.events.subject import key_of_token
from millstream.messaging.groups.holding import order_token
from millstream.messaging.groups.member import start_position
from millstream.messaging.groups.records import MemberRecord, PartitionRecord, Position
from millstream.messaging.groups.store import GroupStore, Stored, groups_of
from millstream.messaging.subscriptions.admin import Lag
from millstream.messaging.topics.info import TopicInfo
from millstream.nearest import propose
from millstream.wire.aio.interest_hold import InterestHold, hold_on
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.interest import Hold

__all__ = [
    "GroupAdmin",
    "GroupInfo",
    "GroupMember",
    "GroupPartition",
    "ParkedKey",
    "hold_for_groups",
]

# A busy owner writes its record about once a second; a change from outside fits in between.
ATTEMPTS: Final = 20
WRITE_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class ParkedKey:
    """A key whose events become dead letters, and the event it was parked for."""

    key: str
    partition: int
    offset: int
    index: int
    since: datetime


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member that runs, or that ended so recently that no other has noticed."""

    id: str
    name: str
    since: datetime
    leaving: bool
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupPartition:
    """The position of a group in one partition."""

    partition: int
    owner: str | None  # the member's id
    epoch: int
    position: Position  # offset and index: everything before is done
    lag: Lag  # messages not done yet, and the age of the oldest of them
    parked: tuple[ParkedKey, ...]


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """Current state of a group."""

    topic: str
    name: str
    members: tuple[GroupMember, ...]
    partitions: tuple[GroupPartition, ...]

    @property
    def lag(self) -> Lag:
        """Lag of the entire group."""
        lags = [partition.lag for partition in self.partitions]
        return Lag(sum(x.messages for x in lags), max((x.seconds for x in lags), default=0.0))

    @property
    def parked(self) -> tuple[ParkedKey, ...]:
        """The parked keys of all partitions."""
        return tuple(key for partition in self.partitions for key in partition.parked)


async def hold_for_groups(jetstream: JetStream, topic: TopicInfo) -> None:
    """Keep events for the topic's groups, before it becomes an interest topic."""
    for name in await groups_of(jetstream, topic.name):
        for partition in topic.partitions:
            await InterestHold(jetstream, Hold(partition.stream, "group", name)).open(known=False)


class GroupAdmin:
    """The groups of one topic: `await topic.groups.info("billing")`."""

    def __init__(
        self,
        jetstream: JetStream,
        publisher: StreamPublisher,
        topic: str,
        partitions: Sequence[Partition],
    ) -> None:
        self._jetstream = jetstream
        self._publisher = publisher
        self._topic = topic
        self._partitions = partitions

    async def names(self) -> builtin_list[str]:
        """The groups of the topic, running or not."""
        return await groups_of(self._jetstream, self._topic)

    async def list(self) -> builtin_list[GroupInfo]:
        """The groups of the topic, running or not; one that is deleted meanwhile is left out."""
        found = []
        for name in await self.names():
            with suppress(GroupNotFound):
                found.append(await self.info(name))
        return found

    async def info(self, name: str) -> GroupInfo:
        """Members, owners, positions, lag and parked keys."""
        store = self._store(name)
        records = await self._records(store)
        members = await store.members()
        partitions = await asyncio.gather(
            *(
                self._partition_info(partition, records[partition.number].record)
                for partition in self._partitions
                if partition.number in records
            )
        )
        return GroupInfo(self._topic, name, _members(members, records), tuple(partitions))

    async def parked(self, name: str) -> builtin_list[ParkedKey]:
        """The keys of a group whose events become dead letters."""
        records = await self._records(self._store(name))
        return [key for n, stored in sorted(records.items()) for key in _parked(n, stored.record)]

    async def unpark(self, name: str, key: str) -> bool:
        """Hand out the key's next events again; False when it is not parked.

        Its dead letters stay where they are: redrive them first when order matters.
        """
        store, token, found = self._store(name), order_token(key), False
        for number, stored in (await self._records(store)).items():
            if token in stored.record.parked:
                await self._change(store, number, partial(_without, token=token))
                found = True
        store.nudge()
        return found

    async def seek(self, name: str, to: Start) -> None:
        """Continue from another position; GroupBusy while members run. Parked keys stay parked."""
        store = self._store(name)
        await self._check_idle(store)
        for partition in self._partitions:
            hold = await hold_on(self._jetstream, partition.stream, "group", name, known=False)
            offset = await start_position(self._jetstream, partition.stream, to)
            if hold is not None:
                await hold.move_back(offset)
            await self._change(store, partition.number, partial(_moved, offset=offset))

    async def delete(self, name: str) -> None:
        """Delete the group's records; GroupBusy while members run.

        An interest topic then drops what it kept for the group alone.
        """
        store = self._store(name)
        await self._records(store)
        await self._check_idle(store)
        for partition in self._partitions:  # first: a delete that failed half-way can be repeated
            await InterestHold(self._jetstream, Hold(partition.stream, "group", name)).delete()
        await store.forget()

    # -- inside ---------------------------------------------------------------------------

    def _store(self, name: str) -> GroupStore:
        return GroupStore(self._jetstream, self._publisher, self._topic, name)

    async def _records(self, store: GroupStore) -> dict[int, Stored[PartitionRecord]]:
        names = await self.names()
        if store.group not in names:
            missing = GroupNotFound(self._topic, store.group)
            propose(missing, store.group, names)
            raise missing
        return await store.partitions()

    async def _check_idle(self, store: GroupStore) -> None:
        """Return when no member is alive; waits for the lease of one that died."""
        first = await store.members()
        longest = max((stored.record.lease for stored in first.values()), default=0.0)
        over, now = Deadline(longest), first
        while now:
            renewed = [m for m, stored in now.items() if stored != first.get(m)]
            if renewed:
                raise GroupBusy(self._topic, store.group, sorted(renewed))
            if over.passed:
                for member, stored in now.items():
                    await store.end_member(member, stored.revision, WRITE_SECONDS)
                return
            await asyncio.sleep(POLL_SECONDS)
            now = await store.members()

    async def _change(
        self, store: GroupStore, number: int, change: Callable[[PartitionRecord], PartitionRecord]
    ) -> None:
        for _ in range(ATTEMPTS):
            stored = await store.partition(number)
            if stored is None:
                stored = Stored(0, PartitionRecord(position=(1, 0)))
            record = change(stored.record)
            try:
                await store.put_partition(number, record, stored.revision, WRITE_SECONDS)
                return
            except WrongSequence:
                continue
        raise ConfigError(f"partition {number} of group '{store.group}' kept changing")

    async def _partition_info(
        self, partition: Partition, record: PartitionRecord
    ) -> GroupPartition:
        state = (await self._jetstream.stream_info(partition.stream)).state
        high = max(record.high, record.position)[0]
        beyond = min(max(0, state.last_seq + 1 - high), state.messages)
        messages = beyond + len({offset for offset, _ in record.open if offset < high})
        seconds = 0.0
        if messages:
            ask = {"seq": record.position[0], "next_by_subj": ">"}
            first = await self._jetstream.get_message(partition.stream, ask)
            if first is not None:
                stored_ns = nanoseconds_of(datetime.fromisoformat(first.time))
                seconds = max(0.0, (now_ns() - stored_ns) / 1e9)
        return GroupPartition(
            partition.number,
            record.owner or None,
            record.epoch,
            record.position,
            Lag(messages, seconds),
            tuple(_parked(partition.number, record)),
        )


def _members(
    members: dict[str, Stored[MemberRecord]], records: dict[int, Stored[PartitionRecord]]
) -> tuple[GroupMember, ...]:
    return tuple(
        GroupMember(
            member,
            stored.record.name,
            datetime_of(stored.record.since_ns),
            stored.record.leaving,
            tuple(sorted(n for n, r in records.items() if r.record.owner == member)),
        )
        for member, stored in sorted(members.items())
    )


def _parked(number: int, record: PartitionRecord) -> list[ParkedKey]:
    return [
        ParkedKey(
            key_of_token(token.encode()) or "",
            number,
            at.offset,
            at.index,
            datetime_of(at.since_ns),
        )
        for token, at in record.parked.items()
    ]


def _without(record: PartitionRecord, token: str) -> PartitionRecord:
    parked = {name: at for name, at in record.parked.items() if name != token}
    return msgspec.structs.replace(record, parked=parked)


def _moved(record: PartitionRecord, offset: int) -> PartitionRecord:
    """Reset the progress; the epoch grows, so that old owners stay fenced."""
    return PartitionRecord(position=(offset, 0), epoch=record.epoch + 1, parked=record.parked)
