"""Lost messages: one function decides whether a query stops or warns."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.messaging import NewEvent
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
