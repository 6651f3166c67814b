"""A topic of changes read by position, while its schema grows."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from millstream import Mill
from millstream.cdc.model import Column
from millstream.cdc.sink.topic_positions import TopicPosition
from millstream.cdc.topic_log import Chunk, TopicLog
from millstream.schemas import types as t
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers
from tests.integration.cdc.change_topics import ChangeTopic, insert

pytestmark = pytest.mark.timeout(120)


async def all_chunks(log: TopicLog) -> list[Chunk]:
    return [one async for one in log.chunks({0: TopicPosition(1)}, follow=False)]


def rows(chunks: list[Chunk]) -> list[dict[str, Any]]:
    batches = [batch for one in chunks for batch in one.events]
    return [event["value"]["after"] for batch in batches for event in batch.to_pylist()]


async def test_a_version_that_is_registered_while_the_log_is_opened_is_read(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its two looks: at the topic, and at the versions of the schema."""
    source = await ChangeTopic.create(mill, "orders", [Column("id", t.Int())])
    await source.write([insert({"id": 1})])
    log, look = TopicLog(mill, "orders"), mill.schemas.topic

    async def grown_before(name: str) -> Any:
        monkeypatch.undo()
        await source.grow(Column("price", t.Decimal(10, 2)))
        return await look(name)

    monkeypatch.setattr(mill.schemas, "topic", grown_before)
    await log.open()
    assert log.version == 1
    await source.write([insert({"id": 2, "price": Decimal("9.50")})])
    found = await all_chunks(log)
    await source.close()
    assert [one.version for one in found] == [1, 2]
    assert rows(found) == [{"id": 1}, {"id": 2, "price": Decimal("9.50")}]


async def test_what_follows_an_event_of_an_unknown_schema_is_read(mill: Mill) -> None:
    source = await ChangeTopic.create(mill, "orders", [Column("id", t.Int())])
    log = TopicLog(mill, "orders", undecodable="drop")
    await log.open()
    await source.write([insert({"id": 1})])
    publisher = StreamPublisher(mill.connection)
    subject = f"{log.topic.handle.shape.prefixes[0]}.foreign".encode()
    headers = encode_headers({"Mill-Schema": "999"})
    await publisher.publish(OutgoingMessage(subject, headers, b"{}"), 30, lambda ack: ack)
    publisher.close()
    await source.write([insert({"id": 2})])
    found = await all_chunks(log)
    await source.close()
    assert [row["id"] for row in rows(found)] == [1, 2]
