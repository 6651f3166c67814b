"""Lost messages: one function decides whether a query stops or warns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.messaging import NewEvent
from millstream.testing import running_broker
from tests.spark.conftest import Account, Lake


def delete(account: Account, stream: str, *sequences: int) -> None:
    async def work(mill: Any) -> None:
        for sequence in sequences:
            await mill.jetstream.delete_message(stream, sequence)

    account.run(work)


def test_a_message_deleted_inside_a_range(lake: Lake, account: Account) -> None:
    account.topic("orders")
    account.publish("orders", [b"%d" % n for n in range(1, 11)])
    delete(account, "orders", 4, 5)
    with pytest.raises(Exception, match="2 of the offsets 1 to 10 of 'orders/0' expired or were"):
        lake.read(subscribe="orders").collect()
    left = lake.read(subscribe="orders", failOnDataLoss=False, minPartitions=3).collect()
    assert sorted(int(row.value) for row in left) == [1, 2, 3, 6, 7, 8, 9, 10]


def test_messages_that_expire_while_a_query_is_down(lake: Lake, account: Account) -> None:
    account.topic("orders")
    account.publish("orders", [b"1", b"2"])
    checkpoint = lake.checkpoint()
    lake.collect(lake.stream(subscribe="orders"), checkpoint)
    account.publish("orders", [b"3", b"4", b"5"])

    async def purge(mill: Any) -> None:
        await mill.jetstream.purge_stream("orders", {"seq": 5})

    account.run(purge)
    with pytest.raises(Exception, match="offsets 3 to 4 expired or were deleted"):
        lake.collect(lake.stream(subscribe="orders"), checkpoint)
    rows, _ = lake.collect(lake.stream(subscribe="orders", failOnDataLoss=False), checkpoint)
    assert [row.value for row in rows] == [b"5"]


def test_a_topic_that_was_created_again_is_not_the_same_topic(lake: Lake, account: Account) -> None:
    account.topic("orders")
    account.publish("orders", [b"1", b"2"])
    checkpoint = lake.checkpoint()
    lake.collect(lake.stream(subscribe="orders"), checkpoint)
    account.run(lambda mill: mill.delete_topic("orders"))
    account.topic("orders")
    account.publish("orders", [b"a", b"b", b"c"])
    with pytest.raises(Exception, match="'orders/0' was created again"):
        lake.collect(lake.stream(subscribe="orders"), checkpoint)
    rows, _ = lake.collect(lake.stream(subscribe="orders", failOnDataLoss=False), checkpoint)
    assert [row.value for row in rows] == [b"a", b"b", b"c"]


def test_a_stream_that_reused_its_offsets_is_detected(lake: Lake, account: Account) -> None:
    """What a damaged disk does: the end is lost, and the same offsets hold other messages."""
    account.topic("orders")
    account.publish("orders", [b"1", b"2", b"3"])
    checkpoint = lake.checkpoint()
    lake.collect(lake.stream(subscribe="orders"), checkpoint)
    for file in (checkpoint / "offsets").iterdir():
        if file.name.isdigit() and file.name != "0":
            text = file.read_text()
            before = text.index('"last": "') + len('"last": "')
            file.write_text(text[:before] + "2001" + text[before + 4 :])
    account.publish("orders", [b"4"])
    with pytest.raises(Exception, match="has a different message at offset 3 than the one read"):
        lake.collect(lake.stream(subscribe="orders"), checkpoint)


def test_a_topic_that_is_gone_stops_a_running_query(lake: Lake, account: Account) -> None:
    account.topic("orders")
    account.topic("target")
    account.publish("orders", [NewEvent(b"1")])
    frame = lake.stream(subscribe="orders").select("value")
    query = lake.start(frame, lake.checkpoint(), topic="target")
    query.processAllAvailable()
    account.run(lambda mill: mill.delete_topic("orders"))
    with pytest.raises(Exception, match="there is no topic or stream 'orders'"):
        query.awaitTermination(240)


def test_a_query_stops_at_what_the_broker_has_lost_until_it_is_accepted(
    spark: Any, tmp_path: Path
) -> None:
    """A damaged block of a killed broker: the query read 500 of 1,000 rows without a word."""
    with running_broker(data=tmp_path / "data") as broker:
        account, lake = Account(broker.url), Lake(spark, broker.url, tmp_path)
        account.topic("orders")
        account.publish("orders", [b"value %d;" % n for n in range(1, 11)])
        checkpoint, done = lake.checkpoint(), lake.checkpoint()
        lake.collect(lake.stream(subscribe="orders"), checkpoint)
        account.publish("orders", [b"value %d;" % n for n in range(11, 41)])
        lake.collect(lake.stream(subscribe="orders"), done)
        broker.kill()
        (block,) = broker.data.rglob("streams/orders/msgs/*.blk")
        content = bytearray(block.read_bytes())
        content[content.index(b"value 21;") + 2] ^= 4
        block.write_bytes(content)
        broker.start()
        account.publish("orders", [b"value 41;"])
        lost = "'orders', partition 0: the offsets 21 to 40 are lost"
        with pytest.raises(Exception, match=lost):
            lake.collect(lake.stream(subscribe="orders"), checkpoint)
        with pytest.raises(Exception, match=lost):
            lake.read(subscribe="orders").collect()
        before = lake.read(subscribe="orders", endingOffsets='{"orders": {"0": 21}}').collect()
        assert len(before) == 20
        going_on = lake.read(subscribe="orders", failOnDataLoss=False).collect()
        assert len(going_on) == 21
        rows, _ = lake.collect(lake.stream(subscribe="orders"), done)
        assert [row.value for row in rows] == [b"value 41;"], "it had read all that is lost"

        async def accept(mill: Any) -> None:
            await (await mill.topic("orders")).admin.accept_loss()

        account.run(accept)
        rows, _ = lake.collect(lake.stream(subscribe="orders"), checkpoint)
        assert [int(row.value[6:-1]) for row in rows] == [*range(11, 21), 41]
        assert len(lake.read(subscribe="orders", minPartitions=3).collect()) == 21
