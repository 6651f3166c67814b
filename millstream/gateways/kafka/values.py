"""Typed topics for Kafka's clients: what does not fit is refused as Kafka's invalid records are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa

from millstream.gateways.kafka.batch_heads import BadBatch
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.gateways.rights import Rights
from millstream.gateways.values import BadValue, TopicValues
from millstream.guarded import guarded_topic

__all__ = ["skips_guard", "take"]


def skips_guard(own: Rights, prefix: str) -> bool:
    """Whether the gateway itself stores the packs of a guarded topic, as the topic's guard does.

    `own` are the rights of the gateway's connection, not of a client. The values were checked by
    `take`, so a guard would only do it again, one pack after the other. Without the right to it,
    as the role `app` is, packs go through the guard, which `StreamPublisher` does by itself.
    """
    guarded = guarded_topic(f"{prefix}.".encode()) is not None
    return guarded and own.may_publish(f"{prefix}.>")


async def take(
    values: TopicValues, columns: pa.RecordBatch, counts: Sequence[int] = ()
) -> tuple[pa.RecordBatch, str | None]:
    """The columns of `read_records` as they are stored, and the schema id for `encode`.

    `counts` are the numbers of records of the batches that the columns were read from. BadBatch,
    with the batch and the record in it, for a value that does not fit; then nothing of what was
    read with it may be stored.
    """
    try:
        return await values.take(columns)
    except BadValue as error:
        bad = BadBatch(ErrorCode.invalid_record, error.text, error.row)
        for number, end in enumerate(accumulate(counts)):
            if error.row < end:
                bad.batch, bad.index = number, error.row - end + counts[number]
                break
        raise bad from None
