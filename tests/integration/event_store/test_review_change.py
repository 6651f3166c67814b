"""Attacks on `store.change`, and on types of events: each test states what should hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from millstream import EventStore, Mill
from millstream.errors import ConfigError, MillstreamError, VersionConflict
from tests.integration.event_store.bank import (
    EVENTS,
    Account,
    Deposited,
    Overdrawn,
)

OPEN = pytest.mark.xfail(strict=True, reason="open: review S11")


@dataclass(frozen=True)
class Closed:
    reason: str = ""


@dataclass(frozen=True)
class BigDeposit(Deposited):
    pass


class Kind(Enum):
    GOLD = 1


@dataclass
class Odd(Account):
    class Inner:
        value = 5

    items: list[int] = field(default_factory=list)

    def close(self) -> Closed:
        return Closed("x")

    def big(self) -> BigDeposit:
        return BigDeposit(5)

    def mixed(self) -> list[Any]:
        return [Deposited(1), None]

    def generated(self) -> Iterator[Deposited]:
        yield Deposited(1)
        yield Deposited(2)

    def mutate(self, amount: int) -> None:
        self.balance += amount

    def mutate_and_return(self, amount: int) -> Deposited:
        self.balance += amount
        return Deposited(amount)

    def __len__(self) -> int:
        return len(self.history)

    def __contains__(self, amount: int) -> bool:
        return amount in self.history

    def __iter__(self) -> Iterator[int]:
        return iter(self.history)


@pytest.fixture
async def odd(mill: Mill) -> EventStore:
    return await mill.event_store("accounts", Odd, events=EVENTS)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("close", marks=OPEN),
        pytest.param("big", marks=OPEN),
        "mixed",
    ],
)
async def test_a_decision_is_never_dropped_silently(odd: EventStore, command: str) -> None:
    with pytest.raises(MillstreamError):
        async with odd.change("a1") as account:
            getattr(account, command)()


async def test_a_command_may_yield_events(odd: EventStore) -> None:
    try:
        async with odd.change("a1") as account:
            account.generated()
    except MillstreamError:
        return  # a clear refusal is as good
    assert (await odd.load("a1")).version == 2


@pytest.mark.parametrize("command", ["mutate", "mutate_and_return"])
async def test_a_state_that_is_changed_without_an_event(odd: EventStore, command: str) -> None:
    with pytest.raises(MillstreamError):
        async with odd.change("a1") as account:
            getattr(account, command)(5)


async def test_a_list_that_is_changed_without_an_event(odd: EventStore) -> None:
    with pytest.raises(MillstreamError):
        async with odd.change("a1") as account:
            account.history.append(5)


@pytest.mark.xfail(strict=True, reason="open: review M9")
async def test_dunder_methods(odd: EventStore) -> None:
    await odd.append("a1", [Deposited(1), Deposited(2)])
    async with odd.change("a1") as account:
        assert isinstance(account, Odd)
        assert account == Odd(balance=3, history=[1, 2])
        assert len(account) == 2
        assert 2 in account
        assert list(account) == [1, 2]
        assert str(account).startswith("Odd(")


@pytest.mark.xfail(strict=True, reason="open: review M9")
async def test_truth(odd: EventStore) -> None:
    async with odd.change("a1") as account:
        assert not account  # it has a length of 0


async def test_a_class_inside_the_state(odd: EventStore) -> None:
    async with odd.change("a1") as account:
        assert account.Inner.value == 5


async def test_an_exception_that_the_block_has_seen(store: EventStore, mill: Mill) -> None:
    """The block decided because of an exception, which the newer state does not raise."""
    other = await mill.event_store("accounts", Account, events=EVENTS)
    await store.append("a1", [Deposited(10)])
    with pytest.raises(VersionConflict):
        async with store.change("a1") as account:
            try:
                account.withdraw(100)
            except Overdrawn:
                account.open("poor")
            await other.append("a1", [Deposited(1000)])


async def test_a_stand_in_after_its_block(store: EventStore) -> None:
    async with store.change("a1") as account:
        account.deposit(5)
    with pytest.raises(MillstreamError):
        account.deposit(6)


async def test_a_block_inside_itself(store: EventStore) -> None:
    async with store.change("a1") as account:
        account.deposit(5)
        async with store.change("a1") as again:
            again.deposit(7)
    assert (await store.load("a1")).state.history in ([5, 7], [7, 5])


async def test_an_argument_that_cannot_be_copied(odd: EventStore) -> None:
    async with odd.change("a1") as account:
        account.deposit(sum(n for n in range(3)))
    try:
        async with odd.change("a1") as account:
            account.open(n for n in "x")
    except MillstreamError:
        pass


async def test_update_with_zero_tries(store: EventStore) -> None:
    with pytest.raises(ConfigError):
        await store.update("a1", lambda state: Deposited(1), tries=0)


# -- types ------------------------------------------------------------------------------------


def made(name: str, **fields: Any) -> type:
    namespace: dict[str, Any] = {"__annotations__": {n: t for n, (t, _) in fields.items()}}
    namespace.update({n: d for n, (_, d) in fields.items() if d is not ...})
    namespace["__module__"] = __name__
    return dataclass(type(name, (), namespace))


async def test_versions_that_are_compatible_step_by_step(mill: Mill) -> None:
    one = made("Moved", a=(int, ...), b=(int, 0))
    two = made("Moved", b=(int, 0))
    three = made("Moved", b=(int, 0), a=(str, ""))
    store = await mill.event_store("moves", events=[one])
    await store.append("m", [one(a=5)])
    store = await mill.event_store("moves", events=[two])
    await store.append("m", [two(b=1)])
    store = await mill.event_store("moves", events=[three])
    assert len([e async for e in store.events("m")]) == 2


async def test_a_refused_version_leaves_the_store_usable(mill: Mill) -> None:
    one = made("Moved", a=(int, ...), b=(int, 0))
    two = made("Moved", b=(int, 0))
    three = made("Moved", b=(int, 0), a=(str, ""))
    store = await mill.event_store("moves", events=[one])
    await store.append("m", [one(a=5)])
    await mill.event_store("moves", events=[two])
    with suppress(MillstreamError):
        await mill.event_store("moves", events=[three])
    plain = await mill.event_store("moves")
    assert len([e async for e in plain.events("m")]) == 1
    old = await mill.event_store("moves", events=[two])
    assert len([e async for e in old.events("m")]) == 1


async def test_the_older_shape_again(mill: Mill) -> None:
    one, two = made("Moved", a=(int, ...)), made("Moved", a=(int, ...), b=(int, 7))
    first = await mill.event_store("moves", events=[one])
    await first.append("m", [one(1)])
    second = await mill.event_store("moves", events=[two])
    await second.append("m", [two(2, 3)])
    third = await mill.event_store("moves", events=[one])
    await third.append("m", [one(4)])
    assert [e.data for e in [e async for e in third.events("m")]] == [one(1), one(2), one(4)]
    assert [e.data for e in [e async for e in first.events("m")]] == [one(1), one(2), one(4)]
    assert [e.data for e in [e async for e in second.events("m")]] == [
        two(1, 7),
        two(2, 3),
        two(4, 7),
    ]


async def test_an_upcaster_that_returns_rubbish(mill: Mill) -> None:
    one, two = made("Moved", a=(int, ...)), made("Moved", x=(str, ...))
    store = await mill.event_store("moves", events=[one])
    await store.append("m", [one(1)])
    store = await mill.event_store("moves", events=[two], upcasters={("Moved", 1): lambda d: None})
    with pytest.raises(MillstreamError):
        [e async for e in store.events("m")]
    with pytest.raises(MillstreamError):  # opened without the function
        await mill.event_store("moves", events=[two])


async def test_a_store_with_an_upcaster_can_be_opened_by_tools(mill: Mill) -> None:
    one, two = made("Moved", a=(int, ...)), made("Moved", x=(str, ...))
    store = await mill.event_store("moves", events=[one])
    await store.append("m", [one(1)])
    up = {("Moved", 1): lambda d: {"x": str(d["a"])}}
    store = await mill.event_store("moves", events=[two], upcasters=up)
    await store.append("m", [two("2")])
    plain = await mill.event_store("moves")
    assert len([e async for e in plain.events("m")]) == 2


async def test_an_old_program_goes_on_beside_an_upcaster(mill: Mill) -> None:
    one, two = made("Moved", a=(int, ...)), made("Moved", x=(str, ...))
    old = await mill.event_store("moves", events=[one])
    await old.append("m", [one(1)])
    up = {("Moved", 1): lambda d: {"x": str(d["a"])}}
    await mill.event_store("moves", events=[two], upcasters=up)
    await old.append("m", [one(3)])
    assert len([e async for e in old.events("m")]) == 2
    again = await mill.event_store("moves", events=[one])  # the old program is restarted
    assert len([e async for e in again.events("m")]) == 2
