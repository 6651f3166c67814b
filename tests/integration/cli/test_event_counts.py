"""topic ls and info count the events inside packs."""

from __future__ import annotations

import pytest

import millstream.blocking
from millstream import Packing
from millstream.blocking import Mill
from millstream.cli.views import topic as topic_view
from millstream.errors import ConfigError
from tests.integration.cli.messaging_commands import Commands


def fill(mill: Mill) -> None:
    """A topic of two partitions: 10 plain events, a deletion, 60 events in packs, an own fence."""
    orders = mill.create_topic("orders", partitions=2, schedules=True)
    orders.publish_many([b"%d" % number for number in range(10)])
    orders.publish(None, "gone")
    with orders.producer(Packing(max_events=3)) as producer:
        for number in range(30):
            producer.send(b"%d" % number)
    with orders.writer("w", Packing(max_events=10)) as writer:
        for number in range(1, 31):
            writer.write(b"%d" % number, position=number)
    mill.create_topic("empty")


def test_events_in_packs_are_counted_and_estimates_are_marked(
    millstream_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Commands(millstream_url)
    with millstream.blocking.connect(millstream_url) as mill:
        fill(mill)
        counted = mill.count_events("orders")
        read = sum(1 for _ in mill.topic("orders").read())
        assert (counted.events, counted.exact) == (read, True) == (71, True)
        with pytest.raises(ConfigError):
            mill.count_events("orders-0")  # a partition on its own: a foreign stream
    listed = {topic["name"]: topic for topic in run.json("topic", "ls")}
    assert (listed["orders"]["events"], listed["orders"]["events_exact"]) == (71, True)
    assert listed["orders"]["messages"] < 71
    assert (listed["empty"]["events"], listed["empty"]["events_exact"]) == (0, True)
    assert run.json("topic", "info", "orders")["events"] == 71
    assert "events: 71, in" in run("topic", "info", "orders")
    assert " 71 " in run("topic", "ls")
    monkeypatch.setattr(topic_view, "PACKS_MAX", 1)
    with monkeypatch.context() as patch:
        patch.setattr("millstream.messaging.reading.replay.TAKE_MESSAGES", 2)
        estimate = run.json("topic", "info", "orders")
        assert not estimate["events_exact"]
        assert 11 < estimate["events"] < 200
        assert "~" in run("topic", "ls")
    assert run.json("topic", "info", "orders", "--exact")["events"] == 71
