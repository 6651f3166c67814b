"""Keeps events of interest topics for a streaming query until its batches are complete.

The rules are those of `wire/interest.py`. A query's position is in its checkpoint, which only Spark
knows: `commit` tells when a batch is complete for good, and the hold moves then. Nothing that Spark
hands to a source identifies the query, so the user names it (option `groupId`).
"""

from __future__ import annotations

from collections.abc import Mapping

from millstream.errors import ConfigError, SubscriptionNotFound
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import PATIENCE_SECONDS, jetstream_to
from millstream.spark.source.offsets import PartitionState, SourceOffset, TopicPartition
from millstream.spark.source.partitions import report_loss
from millstream.wire.api import ConsumerInfo, consumer_request
from millstream.wire.interest import Hold, needs_hold

__all__ = ["QueryHolds"]


class QueryHolds:
    """The holds of one query, by partition. Travels to workers with its reader, so it is plain."""

    def __init__(self, settings: ConnectionSettings, group_id: str | None, fail: bool) -> None:
        self._settings = settings
        self._group_id = group_id
        self._fail = fail
        self._open: dict[TopicPartition, Hold] = {}

    def open(self, states: Mapping[TopicPartition, PartitionState], reached: SourceOffset) -> bool:
        """Hold what needs it; whether something was created, which makes `states` outdated.

        `reached`: where the query is; a partition in it was held before.
        """
        created = False
        for partition, state in states.items():
            if partition in self._open or not self._needed(state):
                continue
            hold = Hold(state.stream, "query", self._group_id or "")
            info = self._find(hold)
            if info is None:
                if partition in reached:
                    report_loss(hold.gone(), self._fail)
                info = self._create(hold)
                created = True
            hold.found(info)
            self._open[partition] = hold
        return created

    def check(self, start: SourceOffset) -> None:
        """Report if what a batch is about to read may have been released by another query."""
        for partition, hold in self._open.items():
            if partition in start and (info := self._find(hold)) is not None:
                hold.found(info)
                self._check_start(hold, start[partition].next)

    def move(self, end: SourceOffset) -> None:
        """Let the broker drop what is before the end of a completed batch."""
        for partition, hold in self._open.items():
            request = hold.move(end[partition].next) if partition in end else None
            if request is None:
                continue
            mine = hold.start
            info = self._find(hold)
            if info is None:
                report_loss(hold.gone(), self._fail)
                info = self._create(hold)
            hold.found(info)
            self._check_start(hold, mine)
            jetstream_to(self._settings).ask(request.verb, request.body, PATIENCE_SECONDS)
            hold.moved(end[partition].next)

    def _check_start(self, hold: Hold, expected: int) -> None:
        """The hold may be behind, never ahead of its query."""
        if hold.start > max(expected, 1):
            report_loss(
                f"the hold of {hold.reader} on '{hold.stream}' starts at offset {hold.start}, "
                f"though the query is at {expected}: another query has the same groupId, or this "
                f"one continues from an older checkpoint. Offsets in between may be gone",
                self._fail,
            )

    def _needed(self, state: PartitionState) -> bool:
        config = {"name": state.stream, "retention": state.retention}
        needed = needs_hold(config, "a streaming query")
        if needed and self._group_id is None:
            raise ConfigError(
                f"'{state.topic}' keeps an event only while a subscription wants it (retention "
                f"interest): give the query a name of its own with the option 'groupId', under "
                f"which the broker keeps its events"
            )
        return needed

    def _find(self, hold: Hold) -> ConsumerInfo | None:
        verb = f"CONSUMER.INFO.{hold.stream}.{hold.name}"
        try:
            return jetstream_to(self._settings).call(verb, None, ConsumerInfo, PATIENCE_SECONDS)
        except SubscriptionNotFound:
            return None

    def _create(self, hold: Hold) -> ConsumerInfo:
        verb, body = consumer_request(hold.stream, hold.config(), "create")
        return jetstream_to(self._settings).call(verb, body, ConsumerInfo, PATIENCE_SECONDS)
