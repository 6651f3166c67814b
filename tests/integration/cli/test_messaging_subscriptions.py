"""subscription create, ls, info, edit, pull, seek, pause, resume, rm; top; trace."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import millstream
from millstream.cli.views.top import rates, take_snapshot
from millstream.errors import SubscriptionNotFound
from millstream.testing import running_cluster
from tests.integration.cli.messaging_commands import Commands

PATIENT = ("--timeout", "60s")  # for an answer that is sure to come


@pytest.fixture
def run(millstream_url: str) -> Commands:
    """A topic with five events, e1 to e5."""
    run = Commands(millstream_url)
    run("topic", "create", "orders")
    run("pub", "-t", "orders", "-l", piped="e1\ne2\ne3\ne4\ne5\n")
    return run


def pulled(run: Commands, *options: str, wait: str = "60s") -> list[str]:
    """What a pull prints; it waits only for the first event."""
    events = run.lines("subscription", "pull", "orders", "bill", "--wait", wait, *options)
    return [event["value"] for event in events]


def test_a_subscription_is_created_with_its_settings_and_shown(run: Commands) -> None:
    made = run.json(
        "subscription", "create", "orders", "bill", "--start", "3", "--ack-wait", "10s",
        "--max-deliver", "4", "--backoff", "1s,1m", "--max-in-flight", "50",
        "--member-rate-limit", "9.5", "--dead-letter", "lost", "--description", "bills",
        "--inactive-after", "1d",
    )  # fmt: skip
    settings = made["settings"]
    assert settings["start"] == "3"
    assert (settings["ack_wait"], settings["backoff"]) == (10.0, [1.0, 60.0])
    assert (settings["max_deliver"], settings["max_in_flight"]) == (4, 50)
    assert (settings["member_rate_limit"], settings["dead_letter"]) == (9.5, "lost")
    assert settings["inactive_after"] == 86400.0
    assert made["pending"] == 3
    shown = run.json("subscription", "info", "orders", "bill")
    assert shown["settings"] == settings
    assert shown["lag"]["messages"] == 3
    assert shown["lag"]["seconds"] > 0
    text = run("subscription", "info", "orders", "bill")
    assert "lag: 3 messages" in text
    assert "max deliver: 4" in text


def test_the_short_name_of_the_group_is_the_same_group(run: Commands) -> None:
    run("subs", "create", "orders", "bill")
    (listed,) = run.json("subs", "ls")
    assert (listed["topic"], listed["name"], listed["pending"]) == ("orders", "bill", 5)
    assert "bill" in run("subscription", "ls", "orders")


def test_a_conflict_names_the_setting(run: Commands) -> None:
    run("subs", "create", "orders", "bill", "--ack-wait", "10s")
    run("subs", "create", "orders", "bill", "--ack-wait", "10s")
    assert "ack_wait" in run.error("subs", "create", "orders", "bill", "--ack-wait", "20s")


def test_pulled_and_acked_events_are_not_redelivered(run: Commands) -> None:
    run("subs", "create", "orders", "bill")
    assert pulled(run, "--ack", "-n", "2") == ["e1", "e2"]
    assert pulled(run, "--ack", "-n", "9") == ["e3", "e4", "e5"]
    assert pulled(run, "--ack", wait="300ms") == []
    shown = run.json("subs", "info", "orders", "bill")
    assert (shown["pending"], shown["in_flight"], shown["lag"]["messages"]) == (0, 0, 0)


def test_a_pull_takes_no_more_from_the_broker_than_it_prints(run: Commands) -> None:
    run("subs", "create", "orders", "bill", "--ack-wait", "1h", "--max-deliver", "9")
    assert pulled(run, "-n", "2") == ["e1", "e2"]
    shown = run.json("subs", "info", "orders", "bill")
    assert (shown["pending"], shown["in_flight"]) == (3, 2)
    assert pulled(run, "-n", "3") == ["e3", "e4", "e5"]
    run("subs", "edit", "orders", "bill", "--ack-wait", "1s")
    assert pulled(run, "--ack") == ["e1"]  # its lease is over now


def test_a_misspelt_name_creates_no_subscription(run: Commands) -> None:
    with pytest.raises(SubscriptionNotFound):
        run("subs", "pull", "orders", "bil")
    assert run.json("subs", "ls", "orders") == []


def test_a_subscription_is_moved(run: Commands) -> None:
    run("subs", "create", "orders", "bill")
    third = run.lines("topic", "tail", "orders", "-o", "3", "-c", "1")[0]["timestamp"]
    assert len(pulled(run, "--ack", "-n", "5")) == 5
    seek = ("subs", "seek", "orders", "bill")
    assert run.json(*seek, "--start")["pending"] == 5
    assert run.json(*seek, "--offset", "4", "-y")["pending"] == 2
    assert pulled(run, "--ack", "-n", "5") == ["e4", "e5"]
    assert run.json(*seek, "--time", third, "-y")["pending"] == 3
    assert run.json(*seek, "--end", "-y")["pending"] == 0
    assert "--yes" in run.error(*seek, "--end")
    assert "one of" in run.error(*seek)
    assert "one of" in run.error(*seek, "--end", "--start")


def test_a_paused_subscription_delivers_nothing(run: Commands) -> None:
    run("subs", "create", "orders", "bill")
    run("subs", "pause", "orders", "bill")
    assert pulled(run, wait="300ms") == []
    assert run.json("subs", "info", "orders", "bill")["paused"]
    run("subs", "resume", "orders", "bill")
    assert pulled(run, "--ack") == ["e1"]
    until = run.json("subs", "pause", "orders", "bill", "--for", "1h")["paused_until"]
    assert until.endswith("Z")


def test_settings_are_changed_and_the_position_is_kept(run: Commands) -> None:
    run("subs", "create", "orders", "bill", "--max-deliver", "3")
    assert pulled(run, "--ack", "-n", "2") == ["e1", "e2"]
    changed = run.json(
        "subs", "edit", "orders", "bill", "--ack-wait", "5s", "--max-deliver", "none"
    )
    assert changed["settings"]["ack_wait"] == 5.0
    assert changed["settings"]["max_deliver"] is None
    assert changed["pending"] == 3
    assert "not a number" in run.error("subs", "edit", "orders", "bill", "--max-deliver", "x")
    assert "at least one" in run.error("subs", "edit", "orders", "bill")


def test_a_subscription_is_removed_only_with_confirmation(run: Commands) -> None:
    run("subs", "create", "orders", "bill")
    assert "--yes" in run.error("subs", "rm", "orders", "bill")
    run("subs", "rm", "orders", "bill", "--yes")
    assert run.json("subs", "ls") == []


# -- top ----------------------------------------------------------------------------------


async def test_rates_and_lag_are_those_between_two_snapshots(millstream_url: str) -> None:
    async with millstream.connect(millstream_url) as mill:
        topic = await mill.create_topic("orders", partitions=2)
        async with topic.subscribe("bill") as member:
            before = await take_snapshot(mill, [])
            await topic.publish_many([millstream.NewEvent(b"x", key=str(n)) for n in range(20)])
            taken: list[millstream.Delivery] = []
            while len(taken) < 20:
                taken += await member.pull(20)
            for delivery in taken:
                await delivery.ack_sync()
            await topic.publish(b"late", key="a")
            after = await take_snapshot(mill, [])
        seen = rates(before, after)
        seconds = after.time - before.time
        (stored,) = seen["topics"]
        (reader,) = seen["subscriptions"]
        assert stored["stored_per_second"] == round(21 / seconds, 1)
        assert reader["settled_per_second"] == round(20 / seconds, 1)
        assert reader["lag_messages"] == 1
        assert 0 < reader["lag_seconds"] < seconds


def test_top_shows_topics_and_subscriptions_as_tables_and_objects(run: Commands) -> None:
    run("subs", "create", "orders", "bill")
    (seen,) = run.lines("top", "-c", "1", "-i", "100ms")
    assert seen["topics"][0]["messages"] == 5
    assert seen["subscriptions"][0]["lag_messages"] == 5
    text = run("top", "orders", "-c", "2", "-i", "100ms")
    assert text.count("bill") == 2
    assert "no topic or stream 'other'" in run.error("top", "other", "-c", "1")
    assert "100ms" in run.error("top", "-i", "1ms")


# -- trace --------------------------------------------------------------------------------


def test_a_trace_names_the_stream_and_stores_nothing(run: Commands) -> None:
    text = run("trace", "orders.k", *PATIENT)
    assert "into stream 'orders' as orders.k" in text
    assert "dry run" in text
    assert run.json("topic", "info", "orders")["messages"] == 5
    (report,) = run.json("trace", "orders.k", "--deliver", *PATIENT)
    assert {"js", "in"} <= {event["type"] for event in report["events"]}
    assert run.json("topic", "info", "orders")["messages"] == 6
    assert "no subscriber and no topic" in run("trace", "other.k", *PATIENT)


async def test_a_trace_shows_the_path_through_a_cluster() -> None:
    async with running_cluster(3) as cluster:
        urls = cluster.url.split(",")
        async with millstream.connect(urls[0]) as here, millstream.connect(urls[1]) as there:
            seen = asyncio.Event()
            async with there.subscribe("far.*", handler=lambda _: seen.set()):
                while not seen.is_set():  # until the interest has reached the other server
                    await here.publish("far.a")
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(seen.wait(), 0.05)
                text = await asyncio.to_thread(Commands(urls[0]), "trace", "far.b", *PATIENT)
    lines = [line.strip("│├└─ \xa0") for line in text.splitlines()]
    servers = [line for line in lines if line.startswith("server ")]
    assert len(servers) == 2
    assert any(line.startswith("to server of the cluster") for line in lines)
    assert any("listening on far.*" in line for line in lines)
