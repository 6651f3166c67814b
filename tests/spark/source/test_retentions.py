"""What Spark reads of interest topics and work queues: all that is promised, or a clear refusal."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import ConfigError, DataLoss
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import jetstream_to
from millstream.spark.options import SourceOptions
from millstream.spark.sink.targets import find_target
from millstream.spark.source.holds import QueryHolds
from millstream.spark.source.offsets import PartitionOffset, SourceOffset
from millstream.spark.source.partitions import PartitionStates, find_partitions
from tests.spark.conftest import Account, Lake, forget_commit, last_batch


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last)]


def stored(account: Account, topic: str) -> int:
    async def count(mill: Any) -> int:
        return int((await (await mill.topic(topic)).info()).messages)

    found: int = account.run(count)
    return found


def test_an_interest_topic_keeps_events_for_a_query_until_they_are_handled(
    lake: Lake, account: Account
) -> None:
    account.topic("orders", retention="interest", partitions=2)
    checkpoint = lake.checkpoint()

    def run() -> list[bytes]:
        frame = lake.stream(subscribe="orders", groupId="billing")
        return sorted(bytes(row.value) for row in lake.collect(frame, checkpoint)[0])

    assert run() == []  # the query exists from here on
    account.publish("orders", numbers(10, 20))
    assert run() == numbers(10, 20)
    forget_commit(checkpoint, last_batch(checkpoint))  # as if it was killed before its end
    account.publish("orders", numbers(20, 30))
    assert run() == numbers(10, 30)
    assert stored(account, "orders") == 10  # the last batch, until the next one follows


def test_a_query_on_an_interest_topic_needs_a_name(lake: Lake, account: Account) -> None:
    account.topic("orders", retention="interest")
    with pytest.raises(Exception, match=r"'orders' keeps an event only while.*option 'groupId'"):
        lake.collect(lake.stream(subscribe="orders"), lake.checkpoint())


def holds(account: Account, fail: bool = True) -> QueryHolds:
    return QueryHolds(ConnectionSettings(urls=(account.url,)), "billing", fail)


def states(account: Account) -> PartitionStates:
    jetstream = jetstream_to(ConnectionSettings(urls=(account.url,)))
    return find_partitions(jetstream, SourceOptions(topics=("orders",)))


def at(offset: int) -> SourceOffset:
    return {("orders", 0): PartitionOffset(offset, "")}


def test_a_query_whose_hold_was_deleted_stops(account: Account) -> None:
    account.topic("orders", retention="interest")
    assert holds(account).open(states(account), {})

    async def delete(mill: Any) -> None:
        await (await mill.topic("orders")).subscriptions.delete("hold-query-billing")

    account.run(delete)
    with pytest.raises(DataLoss, match="keeps events for query 'billing' is missing"):
        holds(account).open(states(account), at(1))
    account.publish("orders", [b"lost"])
    assert holds(account, fail=False).open(states(account), at(1))
    account.publish("orders", [b"kept"])
    assert account.values("orders") == [b"kept"]


def test_a_second_query_of_the_same_name_is_found_out(account: Account) -> None:
    account.topic("orders", retention="interest")
    one, other = holds(account), holds(account)
    one.open(states(account), {})
    account.publish("orders", numbers(0, 6))
    other.open(states(account), {})
    other.check(at(1))
    one.check(at(1))
    other.move(at(4))
    with pytest.raises(DataLoss, match="another query has the same groupId"):
        one.check(at(1))  # planning a batch
    with pytest.raises(DataLoss, match="another query has the same groupId"):
        holds_at_first(account).move(at(3))
    assert account.values("orders") == numbers(3, 6)


def holds_at_first(account: Account) -> QueryHolds:
    """The holds of a query that was in mid-batch when another one moved them."""
    found = holds(account)
    found.open(states(account), at(1))
    found._open["orders", 0].moved(1)
    return found


def test_a_batch_read_of_a_work_queue_takes_nothing_from_it(lake: Lake, account: Account) -> None:
    account.topic("jobs", retention="workqueue", partitions=2)
    account.publish("jobs", numbers(10, 20))
    account.pack("jobs", [(value, "k") for value in numbers(20, 30)])
    rows = lake.read(subscribe="jobs").collect()
    assert sorted(row.value for row in rows) == numbers(10, 30)
    chosen = lake.read(subscribe="jobs").where("key = 'k'").collect()
    assert sorted(row.value for row in chosen) == numbers(20, 30)
    assert sorted(account.values("jobs")) == numbers(10, 30)


def test_a_streaming_query_refuses_a_work_queue_at_once(lake: Lake, account: Account) -> None:
    account.topic("jobs", retention="workqueue")
    account.publish("jobs", [b"1"])
    with pytest.raises(Exception, match="a streaming query: 'jobs' is a work queue"):
        lake.collect(lake.stream(subscribe="jobs"), lake.checkpoint())
    assert stored(account, "jobs") == 1


@pytest.mark.parametrize("retention", ["interest", "workqueue"])
def test_a_sink_refuses_topics_that_do_not_keep_its_fence(account: Account, retention: str) -> None:
    account.topic("jobs", retention=retention)
    with pytest.raises(ConfigError, match=f"'jobs' has retention {retention}"):
        find_target(ConnectionSettings(urls=(account.url,)), "jobs")
