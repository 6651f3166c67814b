"""A mirror of a store's topic: the server lets it answer for the store, also while it lags."""

from __future__ import annotations

from dataclasses import dataclass

from millstream import NEW, Mill
from millstream.messaging.topics.handle import TopicHandle
from millstream.wire.aio.direct_reader import direct_batch

ROUNDS = 150  # without the check, some of them read what the mirror had


@dataclass(frozen=True)
class Counted:
    number: int


@dataclass
class Counter:
    last: int = 0

    def apply(self, event: Counted) -> None:
        self.last = event.number


async def wait_for_the_mirror_to_answer(handle: TopicHandle, stream: str, mirror: str) -> None:
    while True:
        found, _ = await direct_batch(handle.jetstream, stream, {"seq": 1, "batch": 1})
        if found and found[0].stream == mirror:
            return


async def test_a_load_has_the_last_append_although_a_mirror_answers(mill: Mill) -> None:
    store = await mill.event_store("counters", Counter, events=[Counted])
    await store.append("c", [Counted(0)], NEW)
    await mill.create_topic("copy", mirror="counters")
    topic = await mill.topic("counters", bytes)
    await wait_for_the_mirror_to_answer(topic.handle, "counters", "copy")
    for number in range(1, ROUNDS):
        await store.append("c", [Counted(number)])
        assert (await store.load("c")).state.last == number
        await store.append(f"new-{number}", [Counted(number)], NEW)
        assert (await store.load(f"new-{number}")).version == 1
        assert len([event async for event in store.events("c")]) == number + 1
