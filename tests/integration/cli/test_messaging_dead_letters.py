"""dlq ls, show, edit, redrive, rm: dead letters from the command line."""

from __future__ import annotations

import asyncio
import json

import pytest

import millstream
from millstream.errors import DeadLetterNotFound
from tests.integration.cli.messaging_commands import Commands

CAUSES = {"a": "no such customer", "b": "Time out"}


@pytest.fixture
def run(millstream_url: str) -> Commands:
    """Four events of keys a and b that the subscription 'bill' dead-lettered."""

    async def give_up() -> None:
        async with millstream.connect(millstream_url) as mill:
            topic = await mill.create_topic("orders")
            for number in range(4):
                await topic.publish(b"event %d" % number, key="ab"[number % 2], headers={"N": "1"})
            async with topic.subscribe("bill") as member:
                given: list[millstream.Delivery] = []
                while len(given) < 4:
                    given += await member.pull(4)
                for delivery in given:
                    delivery.terminate(CAUSES[str(delivery.key)])

    asyncio.run(give_up())
    return Commands(millstream_url)


ARGUMENTS = ("orders", "bill")


def test_dead_letters_are_counted_listed_and_selected(run: Commands) -> None:
    assert run.json("dlq", "ls") == [
        {"topic": "orders", "subscription": "bill", "queue": "orders-bill-dead", "letters": 4}
    ]
    assert "orders-bill-dead" in run("dlq", "ls", "orders")
    letters = run.json("dlq", "ls", *ARGUMENTS)
    assert [letter["value"] for letter in letters] == [f"event {n}" for n in range(4)]
    chosen = run.json("dlq", "ls", *ARGUMENTS, "--cause", "time out", "--limit", "1")
    assert [(letter["key"], letter["origin_offset"]) for letter in chosen] == [("b", 2)]
    assert len(run.json("dlq", "ls", *ARGUMENTS, "-k", "a", "--first", "2")) == 1
    text = run("dlq", "ls", *ARGUMENTS)
    assert "no such customer" in text
    assert "event 3" in text
    assert "No dead letters found" in run("dlq", "ls", *ARGUMENTS, "-k", "c")


def test_a_dead_letter_is_shown_with_cause_attempts_and_original_event(run: Commands) -> None:
    offset = run.json("dlq", "ls", *ARGUMENTS)[1]["offset"]
    letter = run.json("dlq", "show", *ARGUMENTS, str(offset))
    assert (letter["cause"], letter["attempts"], letter["origin_offset"]) == ("Time out", 1, 2)
    assert letter["headers"] == {"N": "1"}
    text = run("dlq", "show", *ARGUMENTS, str(offset))
    assert "cause: Time out" in text
    assert text.endswith("\nevent 1\n")
    assert run("dlq", "show", *ARGUMENTS, str(offset), "--raw") == "event 1"
    with pytest.raises(DeadLetterNotFound):
        run("dlq", "show", *ARGUMENTS, "999")


def test_edited_letters_are_redriven_in_order_and_once(run: Commands) -> None:
    offset = str(run.json("dlq", "ls", *ARGUMENTS)[0]["offset"])
    edit = ("dlq", "edit", *ARGUMENTS, offset)
    assert "nothing to change" in run.error(*edit)
    assert "not both" in run.error(*edit, "-H", "A: b", "--no-headers")
    edited = run.json(*edit, "--value", "-", "-H", "Fixed: yes", piped="repaired")
    assert (edited["value"], edited["headers"]) == ("repaired", {"Fixed": "yes"})
    assert edited["edited"]
    assert "3 dead letters would" in run("dlq", "redrive", *ARGUMENTS, "--dry-run", "--limit", "3")
    assert run.json("dlq", "redrive", *ARGUMENTS) == {"redriven": 4, "recovered": 0}
    assert "Redrove 0" in run("dlq", "redrive", *ARGUMENTS)
    pulled = run.lines("subs", "pull", *ARGUMENTS, "-n", "9", "--ack", "--wait", "30s")
    assert [event["value"] for event in pulled] == ["repaired", "event 1", "event 2", "event 3"]
    assert pulled[0]["headers"] == {"Fixed": "yes"}
    assert run.json("dlq", "ls", *ARGUMENTS) == []


def test_redriven_events_of_one_subscription_are_read_and_exported_once(run: Commands) -> None:
    events = [f"event {n}" for n in range(4)]
    assert run.json("dlq", "redrive", *ARGUMENTS)["redriven"] == 4
    exported = run("export", "orders", "-", "--format", "jsonl").splitlines()
    assert [json.loads(line)["value"] for line in exported] == events
    assert [event["value"] for event in run.lines("topic", "replay", "orders")] == events
    run("topic", "create", "copy")
    assert "Stored 4 events" in run("topic", "replay", "orders", "--to", "copy")
    pulled = run.lines("subs", "pull", *ARGUMENTS, "-n", "4", "--ack", "--wait", "30s")
    assert [event["value"] for event in pulled] == events


def test_dead_letters_are_removed_only_with_confirmation(run: Commands) -> None:
    offset = str(run.json("dlq", "ls", *ARGUMENTS)[0]["offset"])
    assert "--yes" in run.error("dlq", "rm", *ARGUMENTS)
    assert "offset" in run.error("dlq", "rm", *ARGUMENTS, offset, "-k", "a", "-y")
    assert run.json("dlq", "rm", *ARGUMENTS, offset, "-y")["removed"] == 1
    assert run.json("dlq", "rm", *ARGUMENTS, "-k", "b", "-y")["removed"] == 2
    assert "Removed 1" in run("dlq", "rm", *ARGUMENTS, "-y")
    assert run.json("dlq", "ls", *ARGUMENTS) == []


def test_a_subscription_without_dead_letters_is_no_error(millstream_url: str) -> None:
    run = Commands(millstream_url)
    assert "there are no dead letters" in run("dlq", "ls")
    run("topic", "create", "orders")
    run("subs", "create", *ARGUMENTS)
    assert run.json("dlq", "ls", *ARGUMENTS) == []
    assert run.json("dlq", "ls")[0]["letters"] == 0
    assert run.json("dlq", "redrive", *ARGUMENTS)["redriven"] == 0
