"""A group's records in the broker: read as a snapshot, written by compare-and-set.

They are the last messages of subjects of one stream, so a group costs the broker no consumers and
no watchers. A nudge is a core message that says "read the records now"; when one is lost, the next
regular read sees the same a little later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from millstream.deadline import Deadline
from millstream.errors import (
    ApiError,
    ConnectError,
    NoResponders,
    RequestTimeout,
    TopicConflict,
    TopicNotFound,
    Unconfirmed,
)
from millstream.events.fence import EXPECTED_HEADER
from millstream.events.subject import check_name, key_of_token, key_token
from millstream.messaging.groups.records import MemberRecord, PartitionRecord, decode_record
from millstream.messaging.topics.durability import check_health
from millstream.wire.aio.connection import Interest
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers, parse_headers, status_of, unique_token

__all__ = ["RECORDS", "UNSURE", "GroupStore", "Stored", "groups_of", "topics_with_groups"]

RECORDS: Final = "mill-groups"  # the stream, and the prefix of its subjects
NEWS: Final = "mill-groups-news"
MEMBER: Final = "member"
# The record of a member that left; it must outlast every read of the records.
LEFT_TTL: Final = "1h"
ATTEMPT_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = 0.05
# It is unknown whether it happened: check again later.
UNSURE: Final = (ConnectError, NoResponders, RequestTimeout, Unconfirmed)

R = TypeVar("R")


class Stored(NamedTuple, Generic[R]):
    """A record and its revision (the sequence that a change must name)."""

    revision: int
    record: R


class GroupStore:
    """The records of one group."""

    def __init__(
        self, jetstream: JetStream, publisher: StreamPublisher, topic: str, group: str
    ) -> None:
        self.group = check_name("group", group)
        self._jetstream = jetstream
        self._connection = jetstream.connection
        self._publisher = publisher
        self._prefix = f"{RECORDS}.{key_token(topic)}.{group}"
        self._news = f"{NEWS}.{key_token(topic)}.{group}"

    async def declare(self, replicas: int) -> None:
        """Create the stream of records if needed, with at least this many replicas."""
        config: dict[str, Any] = {
            "name": RECORDS,
            "subjects": [f"{RECORDS}.>"],
            "description": "Millstream: members, owners and positions of ordered groups",
            "max_msgs_per_subject": 1,
            "storage": "file",
            "num_replicas": replicas,
            "allow_direct": True,
            "allow_msg_ttl": True,
        }
        try:
            found = (await self._jetstream.stream_info(RECORDS)).config
        except TopicNotFound:
            await check_health(self._jetstream)  # a create on unreadable files deletes them
            try:
                found = (await self._jetstream.create_stream(config)).config
            except TopicConflict:  # another member was first, for a topic with other replicas
                found = (await self._jetstream.stream_info(RECORDS)).config
        if found.get("num_replicas", 1) < replicas:
            await self._jetstream.update_stream({**found, "num_replicas": replicas})

    # -- reading --------------------------------------------------------------------------

    async def members(self) -> dict[str, Stored[MemberRecord]]:
        """The members that have not left, including dead ones, by id."""
        found = await self._last(f"{self._prefix}.{MEMBER}.*")
        return {
            name: Stored(revision, decode_record(payload, MemberRecord))
            for name, (revision, payload) in found.items()
            if payload
        }

    async def partitions(self) -> dict[int, Stored[PartitionRecord]]:
        """The records of all partitions; on a replicated broker they may be slightly old."""
        found = await self._last(f"{self._prefix}.*")
        return {
            int(name): Stored(revision, decode_record(payload, PartitionRecord))
            for name, (revision, payload) in found.items()
        }

    async def partition(self, number: int) -> Stored[PartitionRecord] | None:
        """The record of one partition as it is now."""
        ask = {"last_by_subj": f"{self._prefix}.{number}"}
        found = await self._jetstream.get_message(RECORDS, ask)
        if found is None:
            return None
        return Stored(found.sequence, decode_record(found.payload, PartitionRecord))

    async def member(self, member: str) -> Stored[MemberRecord] | None:
        """The record of one member as it is now; None when it left or was declared dead."""
        ask = {"last_by_subj": f"{self._prefix}.{MEMBER}.{member}"}
        found = await self._jetstream.get_message(RECORDS, ask)
        if found is None or not found.payload:
            return None
        return Stored(found.sequence, decode_record(found.payload, MemberRecord))

    # -- writing --------------------------------------------------------------------------

    async def put_partition(
        self, number: int, record: PartitionRecord, expected: int, timeout: float
    ) -> int:
        """Write if the revision is still the expected one (0: none); the new revision."""
        return await self._put(str(number), msgspec.json.encode(record), expected, timeout)

    async def put_member(
        self, member: str, record: MemberRecord, expected: int, timeout: float
    ) -> int:
        """Renew a lease; WrongSequence means that others have declared the member dead."""
        name = f"{MEMBER}.{member}"
        return await self._put(name, msgspec.json.encode(record), expected, timeout)

    async def end_member(self, member: str, expected: int, timeout: float) -> None:
        """A member leaves or is declared dead; WrongSequence when it has renewed its lease."""
        await self._put(f"{MEMBER}.{member}", b"", expected, timeout, ("Nats-TTL", LEFT_TTL))

    async def _put(
        self,
        name: str,
        payload: bytes,
        expected: int,
        timeout: float,
        *headers: tuple[str, str],
    ) -> int:
        subject = f"{self._prefix}.{name}".encode()
        block = encode_headers([(EXPECTED_HEADER, str(expected)), *headers])
        message = OutgoingMessage(subject, block, payload)
        return await self._publisher.publish(message, timeout, lambda ack: ack.seq)

    async def forget(self) -> int:
        """Remove every record of the group; the number of records removed."""
        return await self._jetstream.purge_stream(RECORDS, {"filter": f"{self._prefix}.>"})

    # -- nudges ---------------------------------------------------------------------------

    def nudge(self) -> None:
        """Make all members read the records now; delivered at most once."""
        if self._connection.connected:
            self._connection.publish(self._news.encode(), b"")

    def listen(self, nudged: Callable[[], None]) -> Interest:
        """Call `nudged` for every nudge, including our own."""
        return self._connection.subscribe(self._news, lambda *_: nudged())

    def stop_listening(self, interest: Interest) -> None:
        self._connection.unsubscribe(interest)

    # -- inside ---------------------------------------------------------------------------

    async def _last(self, pattern: str) -> dict[str, tuple[int, bytes]]:
        """The last message of every subject, by the subject's last token."""
        deadline = Deadline(self._connection.settings.request_timeout)
        while True:
            await self._connection.wait_connected(deadline)
            try:
                async with asyncio.timeout(deadline.left(at_most=ATTEMPT_SECONDS)):
                    return await self._ask_last(pattern)
            except (TimeoutError, NoResponders) as error:
                if deadline.passed:
                    raise RequestTimeout(pattern, deadline.seconds) from error
                await asyncio.sleep(deadline.left(at_most=PAUSE_SECONDS))

    async def _ask_last(self, pattern: str) -> dict[str, tuple[int, bytes]]:
        found: dict[str, tuple[int, bytes]] = {}
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(_subject: bytes, _reply: bytes, headers: bytes, payload: bytes) -> None:
            code, text = status_of(headers)
            if not code:
                known = parse_headers(headers)
                name = known["Nats-Subject"].rpartition(".")[2]
                found[name] = (int(known["Nats-Sequence"]), payload)
            elif end.done():
                return
            elif code in (204, 404):
                end.set_result(None)
            elif code == 503:
                end.set_exception(NoResponders(pattern))
            else:
                end.set_exception(ApiError(code, 0, f"reading '{pattern}': {text}"))

        inbox = f"{self._connection.settings.inbox_prefix}.{unique_token()}"
        interest = self._connection.subscribe(inbox, take)
        try:
            subject = f"{self._jetstream.prefix}.DIRECT.GET.{RECORDS}"
            body = msgspec.json.encode({"multi_last": [pattern]})
            self._connection.publish(subject.encode(), body, inbox.encode())
            await end
        finally:
            self._connection.unsubscribe(interest)
        return found


async def groups_of(jetstream: JetStream, topic: str) -> list[str]:
    """The names of all groups of a topic, running or not."""
    return sorted(name for _, name in await _recorded(jetstream, key_token(topic)))


async def topics_with_groups(jetstream: JetStream) -> list[str]:
    """The names of all topics that have groups; some of them may have been deleted."""
    found = {key_of_token(token.encode()) for token, _ in await _recorded(jetstream, "*")}
    return sorted(name for name in found if name is not None)


async def _recorded(jetstream: JetStream, topic: str) -> set[tuple[str, str]]:
    """Topic (as a token) and name of every group that has a record of a partition."""
    pattern = f"{RECORDS}.{topic}.*.*"  # members have one token more
    try:
        answer = await jetstream.call(
            f"STREAM.INFO.{RECORDS}", {"subjects_filter": pattern}, dict[str, Any]
        )
    except TopicNotFound:
        return set()
    subjects = [subject.split(".") for subject in answer["state"].get("subjects") or {}]
    return {(tokens[1], tokens[2]) for tokens in subjects}
