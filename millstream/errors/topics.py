"""Errors of topics, publishing, subscriptions and groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.errors.base import MillstreamError

__all__ = [
    "ApiError",
    "DeadLetterNotFound",
    "FencedOut",
    "GroupBusy",
    "GroupNotFound",
    "LimitReached",
    "NotDurable",
    "NotKept",
    "NotReplicated",
    "PartlyStored",
    "PartlyWritten",
    "PayloadTooLarge",
    "ProcessFailed",
    "PublishError",
    "RedriveTaken",
    "RowsMoved",
    "SubscriptionConflict",
    "SubscriptionNotFound",
    "TopicConflict",
    "TopicNotFound",
    "Unconfirmed",
    "WrongSequence",
]


class GroupNotFound(MillstreamError, LookupError):
    """The topic has no ordered group of that name."""

    def __init__(self, topic: str, group: str) -> None:
        self.topic, self.group = topic, group
        super().__init__(
            f"topic '{topic}' has no group '{group}'. Check the name; a group is created when its "
            f"first member opens it"
        )


class GroupBusy(MillstreamError):
    """The group has running members, so it cannot be moved or deleted; nothing was changed."""

    def __init__(self, topic: str, group: str, members: list[str]) -> None:
        self.topic, self.group, self.members = topic, group, members
        super().__init__(
            f"group '{group}' of '{topic}' has running members: {', '.join(members)}. "
            f"Stop them first"
        )


class DeadLetterNotFound(MillstreamError, LookupError):
    """There is no dead letter at that offset: it was redriven, edited, deleted or never existed."""

    def __init__(self, queue: str, offset: int, why: str = "") -> None:
        self.queue, self.offset = queue, offset
        super().__init__(
            f"'{queue}' has no dead letter at offset {offset}{why}. "
            f"List the queue: an edited letter has a new offset"
        )


class RedriveTaken(MillstreamError):
    """Another redrive of the same dead letters took over; what this one has sent stays sent."""

    def __init__(self, queue: str, topic: str) -> None:
        self.queue, self.topic = queue, topic
        super().__init__(
            f"another redrive of '{queue}' to '{topic}' took over. Nothing is stored twice; "
            f"run it again after the other has ended"
        )


class ApiError(MillstreamError):
    """JetStream refused a request.

    `err_code` is the server's own error number, `description` its words for it.
    """

    def __init__(
        self,
        code: int,
        err_code: int,
        description: str,
        advice: str = "",
        *,
        asked: str = "",  # such as `create topic 'orders'`
        found: str = "",  # the description in our words
    ) -> None:
        self.code, self.err_code, self.description = code, err_code, description
        self.advice = advice
        text = description  # code 0: found before a request was sent
        if code:
            to = f" to {asked}" if asked else ""
            text = f"the broker refused{to}: {found or description} (error {err_code})"
        super().__init__(f"{text}. {advice}" if advice else text)


class TopicNotFound(ApiError, LookupError):
    """There is no topic (stream) of that name."""


class TopicConflict(ApiError, ValueError):
    """The topic exists with other settings; the message names the ones that differ.

    `differences` has them as values: setting, wanted, found, changeable, how.
    """

    differences: tuple[Any, ...] = ()


class SubscriptionNotFound(ApiError, LookupError):
    """There is no subscription (consumer) of that name on the topic."""


class SubscriptionConflict(ApiError, ValueError):
    """The subscription exists with other settings; the message names the ones that differ."""


class WrongSequence(ApiError):
    """An expected-sequence check failed: another writer was first.

    `sent_again`: the refused message was a retry, and the first attempt may have been stored and
    followed by others since.
    """

    sent_again = False


class LimitReached(ApiError):
    """A limit of the topic, the account or the disk is used up; nothing was stored."""


class NotReplicated(ApiError):
    """Replicas were requested from a broker that is a single node."""


class PublishError(MillstreamError):
    """An event was not stored, or it is unknown whether it was."""


class NotDurable(PublishError):
    """The topic demands a durability, and the server does less.

    Nothing is published then. Events whose ack was under way when the connection moved to such a
    server are stored, with that durability.
    """

    def __init__(self, topic: str, demanded: str, found: str) -> None:
        self.topic, self.demanded, self.found = topic, demanded, found
        self.facts = (topic, demanded, found)
        given = f"gives '{found}'" if found != "unknown" else "does not say what it does"
        super().__init__(
            f"topic '{topic}' demands the durability '{demanded}', and the server {given}. "
            f"Connect to one that does as demanded, or change the topic's durability"
        )


class PartlyStored(PublishError):
    """Some events of a list were refused, the others are stored; `failed` has errors by index."""

    def __init__(
        self, total: int, failed: Mapping[int, MillstreamError], count: int | None = None
    ) -> None:
        self.total, self.failed = total, dict(failed)
        self.count = len(self.failed) if count is None else count
        first = min(self.failed)
        super().__init__(
            f"{self.count:,} of {total:,} events are not stored; the first is number "
            f"{first} (from 0): {self.failed[first]}"
        )


class PayloadTooLarge(PublishError, ValueError):
    """The message is larger than the server accepts; nothing was sent."""

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(
            f"the message has {size:,} bytes with its headers; the server accepts {limit:,}. "
            f"Send smaller events or raise max_payload"
        )


class Unconfirmed(PublishError):
    """No ack arrived: the event may or may not be stored. Retrying with the same id is safe.

    With `expected_last` or a revision check first: it may have been stored and replaced since.
    """


class NotKept(PublishError):
    """The broker acknowledged an event of an interest topic and dropped it: nobody wants it."""

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        self.topic, self.partition, self.offset = topic, partition, offset
        super().__init__(
            f"the event at offset {offset} of '{topic}', partition {partition}, is not kept: the "
            f"topic keeps events only for its subscriptions (retention interest), and none wants "
            f"this one. Create the subscription, group or process first"
        )


class FencedOut(PublishError):
    """Another process opened a writer of the same name: this one can no longer write.

    `epoch` is this writer's, `found` the one stored in the topic; None where it is not known.
    """

    def __init__(self, writer: str, epoch: int | None = None, found: int | None = None) -> None:
        self.writer, self.epoch, self.found = writer, epoch, found
        known = f" (its epoch is {epoch}, the topic's is {found})" if epoch and found else ""
        super().__init__(
            f"writer '{writer}' was taken over by another process{known}. This call stored "
            f"nothing; the other writer continues from the stored position"
        )


class PartlyWritten(PublishError):
    """A Spark write failed half-way; `written` names what is stored, by partition."""

    def __init__(self, writer: str, written: list[str], cause: str) -> None:
        self.writer, self.written, self.cause = writer, written, cause
        super().__init__(
            f"writer '{writer}' stored some of its rows ({'; '.join(written)}), then failed: "
            f"{cause}"
        )


class RowsMoved(PublishError):
    """Spark reran a batch, and a task got different rows than the first time; nothing is stored.

    Continuing would lose some rows or write some twice.
    """

    def __init__(self, writer: str, batch: int, stored: int, found: int) -> None:
        self.writer, self.batch, self.stored, self.found = writer, batch, stored, found
        super().__init__(
            f"writer '{writer}' stored {stored:,} rows of batch {batch}; now that Spark reruns the "
            f"batch, its rows are different ({found:,} so far): they move between tasks or come "
            f"in another order. Set the option commitMode to staged for this query"
        )


class ProcessFailed(MillstreamError):
    """A process's function raised an error: it stopped there; everything before is committed."""

    def __init__(self, process: str, event: str, error: Exception) -> None:
        self.process, self.event, self.error = process, event, error
        super().__init__(
            f"process '{process}' stopped at {event}: {type(error).__name__}: {error}. "
            f"Fix the function and run it again, or skip such events with on_error='dead_letter'"
        )
