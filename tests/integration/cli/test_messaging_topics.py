"""topic create, ls, info, edit, rm, purge, tail, replay; pub into topics."""

from __future__ import annotations

import time

import pytest

from millstream.errors import TopicNotFound
from millstream.testing import running_broker
from tests.integration.cli.messaging_commands import Commands


@pytest.fixture
def run(millstream_url: str) -> Commands:
    return Commands(millstream_url)


@pytest.fixture
def orders(run: Commands) -> Commands:
    """A topic of two partitions with ten events, keys k0 to k4 twice."""
    run("topic", "create", "orders", "-p", "2")
    lines = "".join(f"k{n % 5}:event {n}\n" for n in range(10))
    run("pub", "-t", "orders", "-l", "-K", ":", piped=lines)
    return run


# -- the topic itself ---------------------------------------------------------------------


def test_a_topic_is_created_with_every_kind_of_setting_and_shown(run: Commands) -> None:
    made = run.json(
        "topic", "create", "orders", "-p", "3", "--max-age", "7d", "--max-bytes", "1GiB",
        "--max-messages", "1000", "--discard", "new", "--compression", "s2", "--replicas", "1",
        "--duplicate-window", "5m", "--description", "what was ordered", "--metadata", "team=shop",
        "--no-message-ttl", "--deny-delete",
    )  # fmt: skip
    settings = made["settings"]
    assert len(made["partitions"]) == 3
    assert settings["max_age"] == "7d"
    assert (settings["max_bytes"], settings["max_messages"]) == (1 << 30, 1000)
    assert (settings["discard"], settings["compression"]) == ("new", "s2")
    assert settings["duplicate_window"] == "5m"
    assert settings["metadata"] == {"team": "shop"}
    assert (settings["message_ttl"], settings["deny_delete"]) == (False, True)
    assert run.json("topic", "info", "orders")["settings"] == settings
    text = run("topic", "info", "orders")
    for word in ("max age: 7d", "orders-2", "what was ordered"):
        assert word in text


def test_creating_a_topic_again_is_a_no_op_and_with_other_settings_an_error(run: Commands) -> None:
    run("topic", "create", "orders", "--max-age", "1h")
    assert "is ready" in run("topic", "create", "orders", "--max-age", "1h")
    sentence = run.error("topic", "create", "orders", "--max-age", "2h")
    assert "max_age" in sentence
    assert "1h" in sentence


def test_a_topic_may_demand_a_durability_that_the_server_gives(run: Commands) -> None:
    with running_broker(durability="periodic") as weaker:
        sentence = Commands(weaker.url).error("topic", "create", "strict", "--durability", "fsync")
        assert "demands the durability 'fsync', and the server gives 'periodic'" in sentence
    given = run.json("topic", "create", "strict", "--durability", "fsync")["settings"]
    assert given["durability"] == "fsync"
    assert "durability: fsync" in run("topic", "info", "strict")


def test_topics_are_listed_with_what_they_hold(orders: Commands) -> None:
    orders("topic", "create", "empty")
    listed = {item["name"]: item for item in orders.json("topic", "ls")}
    assert listed["orders"]["messages"] == 10
    assert listed["empty"]["messages"] == 0
    text = orders("topic", "ls")
    assert "orders" in text
    assert "empty" in text


def test_no_topic_is_a_hint_not_an_empty_table(run: Commands) -> None:
    assert "topic create" in run("topic", "ls")
    assert run.json("topic", "ls") == []


def test_a_setting_is_changed_and_a_limit_removed(run: Commands) -> None:
    run("topic", "create", "orders", "--max-age", "1h", "--max-messages", "5")
    changed = run.json("topic", "edit", "orders", "--max-age", "none", "--max-messages", "7")
    assert changed["settings"]["max_age"] is None
    assert changed["settings"]["max_messages"] == 7
    assert "Changed max_age" in run("topic", "edit", "orders", "--max-age", "2h")
    assert "at least one setting" in run.error("topic", "edit", "orders")
    assert "max-messages" in run.error("topic", "edit", "orders", "--max-messages", "many")


def test_a_topic_is_created_as_a_copy_of_another(orders: Commands) -> None:
    orders("topic", "create", "one")
    orders("pub", "-t", "one", "x")
    made = orders.json("topic", "create", "twin", "--mirror", "one,start=1")
    assert made["settings"]["mirror"]["topic"] == "one"
    both = orders.json("topic", "create", "all", "--source", "one", "--source", "orders")
    assert [origin["topic"] for origin in both["settings"]["sources"]] == ["one", "orders"]
    assert "not one of domain=" in orders.error(
        "topic", "create", "x", "--mirror", "one,nonsense=1"
    )


def test_nothing_is_removed_without_a_terminal_or_yes(orders: Commands) -> None:
    assert "--yes" in orders.error("topic", "rm", "orders")
    assert "--yes" in orders.error("topic", "purge", "orders")
    assert orders.json("topic", "info", "orders")["messages"] == 10
    orders("topic", "rm", "orders", "--yes")
    with pytest.raises(TopicNotFound):
        orders("topic", "info", "orders")


def test_events_are_purged_by_key_by_offset_and_all(orders: Commands) -> None:
    assert orders.json("topic", "purge", "orders", "--key", "k1", "-y")["removed"] == 2
    kept = orders.json("topic", "purge", "orders", "--keep", "1", "-y")
    assert kept["removed"] == 6
    assert "Removed 2 messages" in orders("topic", "purge", "orders", "-y")
    assert "partition" in orders.error("topic", "purge", "orders", "--before", "3", "-y")


# -- publishing into it -------------------------------------------------------------------


def test_a_receipt_reports_the_offset_and_a_duplicate(run: Commands) -> None:
    run("topic", "create", "orders")
    first = run.json("pub", "-t", "orders", "hello", "-k", "a", "--id", "one")
    again = run.json("pub", "-t", "orders", "hello", "-k", "a", "--id", "one")
    assert (first["topic"], first["partition"], first["offset"]) == ("orders", 0, 1)
    assert (first["duplicate"], again["duplicate"], again["offset"]) == (False, True, 1)
    assert "Already stored" in run("pub", "-t", "orders", "hello", "--id", "one")
    assert "offset 2" in run("pub", "-t", "orders", "other")


def test_an_event_keeps_its_key_headers_time_and_id(run: Commands) -> None:
    run("topic", "create", "orders")
    run(
        "pub", "-t", "orders", "grün", "-k", "a.b", "--id", "x-1", "-H", "Source: web",
        "--time", "2026-01-31T12:00:00.123456789Z",
    )  # fmt: skip
    (event,) = run.lines("topic", "tail", "orders", "-o", "beginning", "-e")
    assert event["key"] == "a.b"
    assert event["value"] == "grün"
    assert event["id"] == "x-1"
    assert event["headers"] == {"Source": "web"}
    assert event["timestamp"] == "2026-01-31T12:00:00.123456789Z"


def test_a_body_comes_from_a_pipe_a_file_or_a_template(run: Commands, tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "body.bin"
    file.write_bytes(b"\x00\xff")
    run("topic", "create", "orders")
    run("pub", "-t", "orders", piped=b"two\nlines")
    run("pub", "-t", "orders", f"@{file}")
    run("pub", "-t", "orders", "n {{Count}}", "-c", "2", "--template", "--id", "i{{Count}}")
    events = run.lines("topic", "tail", "orders", "-o", "beginning", "-e")
    assert events[0]["value"] == "two\nlines"
    assert events[1]["value_base64"] == "AP8="
    assert [(event["value"], event["id"]) for event in events[2:]] == [("n 1", "i1"), ("n 2", "i2")]


def test_an_event_without_a_value_differs_from_an_empty_one(run: Commands) -> None:
    run("topic", "create", "users")
    run("pub", "-t", "users", "-k", "ann", "--null")
    run("pub", "-t", "users", "", "-k", "bob")
    tail = ("topic", "tail", "users", "-o", "beginning", "-e")
    assert [event["value"] for event in run.lines(*tail)] == [None, ""]
    assert run(*tail, "-f", "%k %S,") == "ann -1,bob 0,"
    assert "(no value)" in run(*tail)


def test_an_age_without_a_unit_is_refused_and_changes_nothing(run: Commands) -> None:
    run("topic", "create", "orders", "--max-age", "7d", "--max-bytes", "1048576")
    for command in (("create", "other"), ("edit", "orders")):
        for option in ("--max-age", "--duplicate-window"):
            says = run.error("topic", *command, option, "7")
            assert "'7' has no unit. Write 7s for seconds or 7d for days" in says
    settings = run.json("topic", "info", "orders")["settings"]
    assert (settings["max_age"], settings["max_bytes"]) == ("7d", 1 << 20)  # a size is in bytes
    assert [info["name"] for info in run.json("topic", "ls")] == ["orders"]


def test_a_scheduled_event_appears_later(run: Commands) -> None:
    run("topic", "create", "orders", "--schedules")
    begun = time.monotonic()
    run("pub", "-t", "orders", "later", "-k", "a", "--at", "2s")
    while not (found := run.lines("topic", "tail", "orders", "-o", "beginning", "-e")):
        assert time.monotonic() < begun + 60
    assert time.monotonic() - begun >= 2
    assert [(event["key"], event["value"]) for event in found] == [("a", "later")]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("pub", "x", "y", "--key", "k"), "-t"),
        (("pub", "-t", "orders", "y", "--reply-to", "z"), "--reply-to"),
        (("pub", "-t", "orders", "y", "-c", "2", "--id", "i"), "{{Count}}"),
        (("pub", "-t", "orders", "y", "-K", ":"), "--lines"),
        (("pub", "x", "y", "--lines"), "body"),
        (("pub", "-t", "orders", "y", "-k", "a", "--null"), "without a value"),
        (("pub", "x", "y", "-H", "no colon"), "Name: value"),
        (("pub", "x", "{{What}}", "--template"), "{{What}}"),
        (("pub", "-t", "orders", "y", "--time", "2026-01-31T12:00:00"), "zone"),
    ],
)
def test_contradicting_options_are_refused_in_one_sentence(
    run: Commands, arguments: tuple[str, ...], word: str
) -> None:
    run("topic", "create", "orders")
    assert word in run.error(*arguments)


# -- reading ------------------------------------------------------------------------------


def values(events: list[dict[str, str]]) -> list[str]:
    return sorted(event["value"] for event in events)


def test_a_tail_starts_at_the_given_position(orders: Commands) -> None:
    everything = [f"event {n}" for n in range(10)]
    tail = ("topic", "tail", "orders", "-e", "-o")
    assert values(orders.lines(*tail, "beginning")) == everything
    assert orders.lines(*tail, "end") == []
    last = {event["partition"]: event["value"] for event in orders.lines(*tail, "-1")}
    by_partition: dict[int, list[str]] = {0: [], 1: []}
    for event in orders.lines(*tail, "beginning"):
        by_partition[event["partition"]].append(event["value"])
    assert last == {part: found[-1] for part, found in by_partition.items()}
    assert values(orders.lines(*tail, "keys")) == everything[5:]
    second = sorted(value for found in by_partition.values() for value in found[1:])
    assert values(orders.lines(*tail, "2")) == second
    assert values(orders.lines(*tail, "@1h")) == everything
    assert orders.lines(*tail, "@2100-01-01T00:00Z") == []


def test_a_tail_ends_after_a_count_and_takes_keys_and_partitions(orders: Commands) -> None:
    tail = ("topic", "tail", "orders", "-o", "beginning")
    assert len(orders.lines(*tail, "--count", "3")) == 3  # without -e: it would go on
    assert values(orders.lines(*tail, "-e", "-k", "k1", "-k", "k2")) == [
        "event 1", "event 2", "event 6", "event 7",
    ]  # fmt: skip
    parts = [len(orders.lines(*tail, "-e", "-p", str(part))) for part in (0, 1)]
    assert sum(parts) == 10
    assert 0 not in parts
    assert "no partition 2" in orders.error(*tail, "-e", "-p", "2")


def test_a_tail_is_written_raw_in_a_format_or_as_lines(orders: Commands) -> None:
    tail = ("topic", "tail", "orders", "-o", "beginning", "-e", "-k", "k3")
    assert orders(*tail, "--raw") == "event 3\nevent 8\n"
    formatted = orders(*tail, "-f", r"%t/%k=%s (%S)\n")
    assert formatted == "orders/k3=event 3 (7)\norders/k3=event 8 (7)\n"
    assert "  k3  event 3\n" in orders(*tail)
    assert "choose one" in orders.error(*tail, "--raw", "--json")
    assert "%z" in orders.error(*tail, "-f", "%z")


def test_a_replay_reads_a_range_and_ends(run: Commands) -> None:
    run("topic", "create", "orders")
    for number in range(1, 6):
        run("pub", "-t", "orders", f"e{number}")
    replay = ("topic", "replay", "orders")
    assert values(run.lines(*replay, "--start", "2", "--end", "4")) == ["e2", "e3"]
    assert values(run.lines(*replay)) == ["e1", "e2", "e3", "e4", "e5"]
    stored = run.lines(*replay)[2]["timestamp"]
    assert values(run.lines(*replay, "--end", f"@{stored}")) == ["e1", "e2"]
    assert values(run.lines(*replay, "--start", f"@{stored}")) == ["e3", "e4", "e5"]
    assert "--end" in run.error(*replay, "--end", "-5")


def test_a_replay_into_another_topic_keeps_events_and_stores_none_twice(orders: Commands) -> None:
    orders("topic", "create", "again")
    said = orders("topic", "replay", "orders", "--to", "again", "-k", "k1")
    assert "Stored 2 events" in said
    said = orders("topic", "replay", "orders", "--to", "again", "-k", "k1")
    assert "Stored 0 events" in said
    assert "2 were already stored" in said
    copies = orders.lines("topic", "replay", "again")
    originals = orders.lines("topic", "replay", "orders", "-k", "k1")
    assert [(c["key"], c["value"], c["timestamp"]) for c in copies] == [
        (o["key"], o["value"], o["timestamp"]) for o in originals
    ]
    assert "itself" in orders.error("topic", "replay", "orders", "--to", "orders")


def test_a_replay_keeps_the_pauses_between_events(run: Commands) -> None:
    run("topic", "create", "orders")
    for second in (0, 4):
        run("pub", "-t", "orders", "x", "--time", f"2026-01-31T12:00:0{second}Z")
    begun = time.monotonic()
    assert len(run.lines("topic", "replay", "orders", "--speed", "10")) == 2
    assert time.monotonic() - begun >= 0.4
    assert "--speed" in run.error("topic", "replay", "orders", "--speed", "0")


async def test_a_foreign_stream_is_read_as_it_is(millstream_url: str) -> None:
    import asyncio

    import nats

    client = await nats.connect(millstream_url, connect_timeout=30)
    stream = client.jetstream(timeout=30)
    await stream.add_stream(name="LEGACY", subjects=["old.*"])
    await stream.publish("old.a", b"1")
    await stream.publish("old.b", b"2")
    await client.close()

    def look() -> tuple[list[dict[str, str]], str]:
        run = Commands(millstream_url)
        tail = ("topic", "tail", "LEGACY", "-o", "beginning", "-e", "--subject", "old.b")
        return run.lines(*tail), run("topic", "ls")

    events, listed = await asyncio.to_thread(look)
    assert [(event["subject"], event["value"]) for event in events] == [("old.b", "2")]
    assert "foreign stream" in listed
