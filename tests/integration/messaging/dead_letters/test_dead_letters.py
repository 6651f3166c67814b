"""Dead letters: listed, shown, changed and brought back in order, exactly once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from millstream.errors import (
    ConfigError,
    DeadLetterNotFound,
    SubscriptionNotFound,
)
from millstream.messaging import (
    DeadLetterFilter,
    DeadLetterQueue,
    NewEvent,
    Topic,
)


async def bury(topic: Topic, count: int, subscription: str = "billing") -> DeadLetterQueue:
    """Make the next `count` events dead letters of a subscription."""
    async with topic.subscribe(subscription) as member:
        async for delivery in member:
            delivery.terminate(f"bad {delivery.key}")
            count -= 1
            if not count:
                break
    return await topic.dead_letters(subscription)


async def test_a_letter_has_the_event_and_why_when_and_where_it_was_dead_lettered(
    topic: Topic,
) -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    before = datetime.now(UTC)
    await topic.publish(b"v", "k/1", headers={"a": "b"}, timestamp=moment, id="id-1")
    queue = await bury(topic, 1)
    [letter] = await queue.list()
    assert (letter.key, letter.value, dict(letter.headers)) == ("k/1", b"v", {"a": "b"})
    assert (letter.timestamp, letter.id) == (moment, "id-1")
    assert (letter.cause, letter.attempts, letter.subscription) == ("bad k/1", 1, "billing")
    assert (letter.topic, letter.partition, letter.origin_offset) == ("orders", 0, 1)
    assert (letter.subject, letter.origin_index) == ("orders.k/1", 0)
    assert before <= letter.when <= datetime.now(UTC)
    assert await queue.show(letter.offset) == letter


async def test_a_queue_without_dead_letters_is_empty(topic: Topic) -> None:
    await (await topic.subscribe("billing")).close()
    queue = await topic.dead_letters("billing")
    assert await queue.list() == []
    assert (await queue.redrive()).redriven == 0
    with pytest.raises(DeadLetterNotFound):
        await queue.show(1)
    with pytest.raises(SubscriptionNotFound):
        await topic.dead_letters("nobody")


async def test_letters_are_stored_in_the_order_of_dead_lettering(topic: Topic) -> None:
    await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 3}") for n in range(100)])
    queue = await bury(topic, 100)
    assert [letter.value for letter in await queue.list()] == [b"%d" % n for n in range(100)]


async def test_letters_are_chosen_by_key_cause_offset_and_limit(topic: Topic) -> None:
    await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 2}") for n in range(4)])
    await topic.publish(b"4")
    queue = await bury(topic, 5)

    async def chosen(**choices: Any) -> list[bytes]:
        return [letter.value for letter in await queue.list(DeadLetterFilter(**choices))]

    assert await chosen(keys=["k1"]) == [b"1", b"3"]
    assert await chosen(keys=[None]) == [b"4"]
    assert await chosen(cause="BAD K0") == [b"0", b"2"]
    assert await chosen(first=2, last=3) == [b"1", b"2"]
    assert await chosen(keys=["k0"], first=2) == [b"2"]
    assert await chosen(limit=2) == [b"0", b"1"]
    assert await chosen(subscription="other") == []
    with pytest.raises(ConfigError):
        DeadLetterFilter(limit=0)
    with pytest.raises(ConfigError):
        DeadLetterFilter(first=3, last=2)


async def test_an_edited_letter_keeps_origin_and_order_and_gets_a_new_offset(topic: Topic) -> None:
    await topic.publish_many([NewEvent(b"%d" % n, "k", id=f"id-{n}") for n in range(3)])
    queue = await bury(topic, 3)
    letter = (await queue.list())[1]
    edited = await queue.edit(letter.offset, value=b"one")
    again = await queue.edit(edited.offset, headers={"x": "y"})
    assert (again.value, dict(again.headers), again.edited) == (b"one", {"x": "y"}, True)
    for name in ("order", "cause", "attempts", "when", "topic", "origin_offset", "key", "id"):
        assert getattr(again, name) == getattr(letter, name), name
    assert [letter.value for letter in await queue.list()] == [b"0", b"one", b"2"]
    for old in (letter, edited):
        with pytest.raises(DeadLetterNotFound):
            await queue.show(old.offset)


async def test_of_two_edits_of_one_letter_one_wins(topic: Topic) -> None:
    await topic.publish(b"v")
    queue = await bury(topic, 1)
    results = await asyncio.gather(
        *(queue.edit(1, value=b"%d" % n) for n in range(5)), return_exceptions=True
    )
    lost = [result for result in results if isinstance(result, DeadLetterNotFound)]
    won = [result for result in results if not isinstance(result, BaseException)]
    assert (len(won), len(lost)) == (1, 4)
    assert await queue.list() == won


async def test_what_cannot_be_edited_is_refused(topic: Topic) -> None:
    await topic.publish(b"v")
    queue = await bury(topic, 1)
    with pytest.raises(ConfigError, match="reserved"):
        await queue.edit(1, headers={"Mill-Dead-Topic": "other"})
    with pytest.raises(ConfigError, match="a dict or a list"):
        await queue.edit(1, value=3)
    with pytest.raises(ConfigError, match="new value"):
        await queue.edit(1)
    assert (await queue.show(1)).value == b"v"


async def test_a_deleted_letter_is_gone_permanently(topic: Topic) -> None:
    await topic.publish_many([NewEvent(b"%d" % n, f"k{n % 2}") for n in range(6)])
    queue = await bury(topic, 6)
    await queue.delete(1)
    assert await queue.purge(DeadLetterFilter(keys=("k1",))) == 3
    assert [letter.value for letter in await queue.list()] == [b"2", b"4"]
    with pytest.raises(DeadLetterNotFound):
        await queue.delete(1)
