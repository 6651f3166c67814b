"""Maintenance of one topic: what operators and tools call, as `topic.admin`."""

from __future__ import annotations

import getpass
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from millstream.events.event import Partition
from millstream.messaging.publishing.acks import Acks
from millstream.messaging.reading.replay import ReadPlan, read_messages
from millstream.messaging.topics import admin as topics
from millstream.messaging.topics.admin import Purge
from millstream.messaging.topics.durability import durabilities_of, shortfall_of
from millstream.messaging.topics.forgetting import Forgetting
from millstream.messaging.topics.handle import TopicHandle
from millstream.messaging.topics.lookup import open_topic, streams_of
from millstream.messaging.topics.losses import accept_loss
from millstream.messaging.topics.placement import spread_leaders
from millstream.wire.lost import LostRange
from millstream.wire.message import RawMessage

if TYPE_CHECKING:
    from millstream.messaging.reading.verify import Verification

__all__ = ["TopicAdmin"]


class TopicAdmin:
    """Maintenance of one topic; `mill.edit_topic` and `mill.delete_topic` change the topic itself.

    `await topic.admin.purge(Purge(key="ann"))`, `async for report in topic.admin.verify()`.
    """

    def __init__(
        self,
        topic: TopicHandle,
        acks: Acks,
    ) -> None:
        self._jetstream = topic.jetstream
        self._topic = topic.shape.topic
        self._partitions = topic.partitions
        self._acks = acks

    async def verify(self) -> AsyncIterator[Verification]:
        """Read the complete log and report every gap; yields the report so far until it is done."""
        # Imported here because it loads pyarrow, which few programs need for this.
        from millstream.messaging.reading.verify import verify_log

        async for report in verify_log(self._jetstream, self._topic, self._partitions):
            yield report

    async def purge(self, what: Purge | None = None) -> int:
        """Remove all events, or those that `what` selects; returns how many messages."""
        return await topics.purge(self._jetstream, self._topic, what)

    async def erase(self, offset: int, partition: int = 0) -> bool:
        """Delete the message at an offset and overwrite it on the broker's disk; admins only.

        False if there is none. Backups still have it, and with replicas the servers' replication
        logs for some minutes.
        """
        stream = self._partitions[partition].stream
        if await self._jetstream.get_message(stream, {"seq": offset}) is None:
            return False
        config = (await self._jetstream.stream_info(stream)).config
        async with Forgetting(self._jetstream, stream, config):
            await self._jetstream.delete_message(stream, offset, erase=True)
        return True

    async def balance(self) -> int:
        """Move the leaders of partitions so that each node leads as many; returns how many moved.

        Topics are created like this; use it when a node is back after it was down, because the
        others have taken over what it led. Needs the permission of an admin.
        """
        return await spread_leaders(self._jetstream, await streams_of(self._jetstream, self._topic))

    async def accept_loss(self, by: str = "") -> list[tuple[int, LostRange]]:
        """Let readers continue after events that the broker has lost; admins only.

        Until then they stop there with DataLoss. `by` says who accepts it, by default this user of
        this machine; it stays in `topic.info()`. Returns the losses that were accepted now, with
        their partitions.
        """
        return await accept_loss(self._jetstream, self._topic, by or _this_user())

    async def refresh_durability(self) -> None:
        """Ask the servers again how durably they store; a reconnect does this automatically.

        Until they have answered, the durability of receipts is `unknown`, and a publish to a topic
        that demands a durability waits.
        """
        self._acks.forget()
        info = await open_topic(self._jetstream, self._topic)
        found = await durabilities_of(self._jetstream, info)
        self._acks.set(found, await shortfall_of(self._jetstream, info))

    def read_messages(self, plan: ReadPlan) -> AsyncIterator[tuple[Partition, list[RawMessage]]]:
        """Like `topic.read`, but stored messages in groups, for tools that decode them."""
        return read_messages(self._jetstream, self._partitions, plan)


def _this_user() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user id without a name, in a container for example
        return socket.gethostname()
