"""group ls, info, unpark, seek, rm."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import millstream.blocking
from millstream.blocking import Topic
from millstream.messaging import GroupSettings
from tests.integration.cli.conftest import until
from tests.integration.cli.messaging_commands import Commands

# A seek waits until a member renews its lease, or the lease ends: so it is not too long.
QUICK = GroupSettings(lease=10.0, commit_every=0.05, backoff=(0.02,), max_attempts=2)


def fail_for_bad(event: Any) -> None:
    if event.key == "bad":
        raise ValueError("cannot handle this")


@pytest.fixture
def topic(millstream_url: str) -> Iterator[Topic]:
    """A topic with four events of two keys."""
    with millstream.blocking.connect(millstream_url) as mill:
        topic = mill.create_topic("orders", partitions=2)
        for number in range(2):
            topic.publish(b"%d" % number, "good")
            topic.publish(b"%d" % number, "bad")
        yield topic


@contextmanager
def member(topic: Topic) -> Iterator[None]:
    """A running member of the group billing, which fails for the events of the key bad."""
    with topic.group("billing", QUICK, member_id="worker-1") as group:
        thread = threading.Thread(target=group.run, args=(fail_for_bad,))
        thread.start()
        yield
    thread.join(60)


def test_a_group_is_listed_shown_unparked_moved_and_removed(
    millstream_url: str, topic: Topic
) -> None:
    run = Commands(millstream_url)
    assert run.json("group", "ls") == []
    assert "no group" in run("group", "ls")

    def info() -> Any:
        return run.json("group", "info", "orders", "billing")

    def parked() -> list[str]:
        return [key["key"] for part in info()["partitions"] for key in part["parked"]]

    with member(topic):
        until(lambda: "billing" in run("group", "ls"))
        until(lambda: parked() == ["bad"] and info()["lag"]["messages"] == 0)
        shown = info()
        (one,) = shown["members"]
        assert (one["name"], one["partitions"], one["leaving"]) == ("worker-1", [0, 1], False)
        assert {part["owner"] for part in shown["partitions"]} == {one["id"]}
        text = run("group", "info", "orders", "billing")
        assert "worker-1" in text
        assert "parked: bad, at partition" in text
        assert "running members" in run.error("group", "seek", "orders", "billing", "--start")
        assert run.json("group", "unpark", "orders", "billing", "bad")["unparked"] == 1
        assert parked() == []

    (listed,) = run.json("group", "ls")
    assert listed == run.json("group", "ls", "orders")[0]
    assert (listed["topic"], listed["name"], listed["members"]) == ("orders", "billing", [])
    assert "Moved group 'billing': 4 messages" in run(
        "group", "seek", "orders", "billing", "--start"
    )
    assert "--yes" in run.error("group", "seek", "orders", "billing", "--end")
    moved = run.json("group", "seek", "orders", "billing", "--end", "--yes")
    assert moved["lag"]["messages"] == 0
    assert "--yes" in run.error("group", "rm", "orders", "billing")
    run("group", "rm", "orders", "billing", "--yes")
    assert run.json("group", "ls") == []


def test_wrong_names_and_keys_are_named(millstream_url: str, topic: Topic) -> None:
    run = Commands(millstream_url)
    with topic.group("billing", QUICK):
        pass
    assert "no group 'bill'" in run.error("group", "seek", "orders", "bill", "--start")
    assert "no group 'bill'" in run.error("group", "info", "orders", "bill")
    assert [group["name"] for group in run.json("group", "ls")] == ["billing"]
    assert "give the keys to unpark, or --all" in run.error("group", "unpark", "orders", "billing")
    assert "'ann'" in run.error("group", "unpark", "orders", "billing", "ann")
    assert "Unparked 0 keys" in run("group", "unpark", "orders", "billing", "--all")
    assert "one of --offset" in run.error("group", "seek", "orders", "billing")


def test_a_deleted_topic_does_not_hide_the_groups_of_others(
    millstream_url: str, topic: Topic
) -> None:
    with millstream.blocking.connect(millstream_url) as mill:
        other = mill.create_topic("other-name")
        for chosen in (topic, other):
            with chosen.group("billing", QUICK):
                pass
        assert [info.topic for info in mill.groups()] == ["orders", "other-name"]
        assert [info.name for info in other.groups.list()] == ["billing"]
        mill.delete_topic("orders")
        assert [info.topic for info in mill.groups()] == ["other-name"]
