"""Publishing an event that must follow an expected offset (optimistic concurrency)."""

from __future__ import annotations

from dataclasses import replace

from millstream.errors import Unconfirmed, WrongSequence
from millstream.events.event import ID_HEADER, NewEvent, Receipt
from millstream.events.fence import EXPECTED_HEADER
from millstream.messaging.publishing.event_publisher import EventPublisher
from millstream.messaging.topics.handle import TopicHandle
from millstream.wire.protocol import parse_headers, unique_token

__all__ = ["publish_after"]


async def publish_after(
    topic: TopicHandle,
    publisher: EventPublisher,
    event: NewEvent,
    last: int,
) -> Receipt:
    """Store an event if `last` is still the last offset of its subject, else WrongSequence.

    A broker that restarted has forgotten the ids of stored events, so a copy that was sent again
    is refused although the first one was stored. Then the message after `last` decides.
    """
    event = replace(event, id=event.id or unique_token(20))
    try:
        return await publisher.publish_event(event)
    except WrongSequence as refused:
        if not refused.sent_again:
            raise
        number, message = publisher.encode(event)
        subject = message.subject.decode()
        query = {"seq": last + 1, "next_by_subj": subject}
        found = await topic.jetstream.get_message(topic.partitions[number].stream, query)
        headers = {} if found is None else parse_headers(found.headers)
        if found is not None and headers.get(ID_HEADER) == event.id:
            durability = publisher.acks.durabilities[number]
            return Receipt(topic.shape.topic, number, found.sequence, True, durability)
        if headers.get(EXPECTED_HEADER) == str(last):
            raise  # another event was stored after `last`
        raise Unconfirmed(
            f"'{subject}' was sent again after its ack was lost, and the copy was refused: "
            f"the event may have been stored after offset {last} and replaced since"
        ) from refused
