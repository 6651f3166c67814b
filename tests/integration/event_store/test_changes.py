"""Changes: commands of a block, repeated on a newer state only if the block would do the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from millstream import NEW, EventStore, Mill
from millstream.errors import ConfigError, UnknownEvent, VersionConflict
from tests.integration.event_store.bank import (
    EVENTS,
    Account,
    Deposited,
    Overdrawn,
    Withdrawn,
)
from tests.integration.event_store.kit import forget_ids


async def test_a_change_appends_what_its_commands_decide(store: EventStore) -> None:
    async with store.change("a1") as account:
        account.open("ann")
        account.deposit(5)
        assert account.balance == 5
    assert (await store.load("a1")).state == Account("ann", 5, [5])


async def test_nothing_of_a_failed_change_is_stored(store: EventStore) -> None:
    async with store.change("a1") as account:
        account.deposit(5)

    async def overdraw() -> None:
        async with store.change("a1") as account:
            account.deposit(1)
            account.withdraw(7)

    with pytest.raises(Overdrawn):
        await overdraw()
    assert (await store.load("a1")).version == 1
    with pytest.raises(ConfigError, match="only events change a state"):
        async with store.change("a1") as account:
            account.balance = 100
    async with store.change("a1"):
        pass  # no command: nothing to append
    assert (await store.load("a1")).version == 1


async def test_changes_that_meet_are_repeated_on_the_newer_state(mill: Mill) -> None:
    stores = [await mill.event_store("accounts", Account, events=EVENTS) for _ in range(6)]

    async def pay(store: EventStore) -> None:
        for _ in range(5):
            async with store.change("a1", tries=100) as account:
                account.deposit(1)

    await asyncio.gather(*map(pay, stores))
    loaded = await stores[0].load("a1")
    assert (loaded.version, loaded.state.balance) == (30, 30)


async def test_a_repeated_change_is_checked_by_its_commands(store: EventStore, mill: Mill) -> None:
    await store.append("a1", [Deposited(5)], NEW)
    other = await mill.event_store("accounts", Account, events=EVENTS)

    async def withdraw_too_late() -> None:
        async with store.change("a1") as account:
            account.withdraw(4)
            await other.append("a1", [Withdrawn(4)], 1)

    with pytest.raises(Overdrawn):
        await withdraw_too_late()
    assert (await store.load("a1")).state.balance == 1


async def test_a_change_that_has_read_what_is_no_longer_true_is_a_conflict(
    store: EventStore, mill: Mill
) -> None:
    await store.append("a1", [Deposited(5)], NEW)
    other = await mill.event_store("accounts", Account, events=EVENTS)

    async def decide_by_the_balance() -> None:
        async with store.change("a1") as account:
            if account.balance == 5:
                account.deposit(100)
            await other.append("a1", [Withdrawn(4)], 1)

    with pytest.raises(VersionConflict):
        await decide_by_the_balance()
    assert (await store.load("a1")).state.balance == 1
    async with store.change("a1") as account:
        if account.owner == "":
            account.open("ann")
        await other.append("a1", [Deposited(1)])  # changes something that was not read
    assert (await store.load("a1")).state == Account("ann", 2, [5, -4, 1])


async def test_update_runs_its_function_again_on_conflict(mill: Mill) -> None:
    stores = [await mill.event_store("accounts", Account, events=EVENTS) for _ in range(5)]

    def double(account: Account) -> Any:
        return Deposited(account.balance or 1)

    await asyncio.gather(*(store.update("a1", double, tries=100) for store in stores))
    assert (await stores[0].load("a1")).state.balance == 16
    with pytest.raises(ConfigError, match="returned 7"):
        await stores[0].update("a1", lambda account: 7)
    assert (await stores[0].update("a1", lambda account: None)).version == 5


async def test_update_needs_at_least_one_try(store: EventStore) -> None:
    with pytest.raises(ConfigError, match="tries 0: give 1 or more"):
        await store.update("a1", lambda account: Deposited(1), tries=0)
    with pytest.raises(ConfigError, match="tries 0: give 1 or more"):
        store.change("a1", tries=0)
    assert (await store.topic.info()).messages == 0


async def test_a_refusal_that_the_block_has_caught_is_checked_on_the_newer_state(
    store: EventStore, mill: Mill
) -> None:
    """The block decided because of an exception, which the newer state does not raise."""
    other = await mill.event_store("accounts", Account, events=EVENTS)
    await store.append("a1", [Deposited(10)])

    async def open_for_the_poor() -> None:
        async with store.change("a1") as account:
            try:
                account.withdraw(100)
            except Overdrawn:
                account.open("poor")
            await other.append("a1", [Deposited(1000)])

    with pytest.raises(VersionConflict):
        await open_for_the_poor()
    assert (await store.load("a1")).state == Account("", 1010, [10, 1000])


async def test_a_refusal_that_is_the_same_on_the_newer_state_is_no_conflict(
    store: EventStore, mill: Mill
) -> None:
    other = await mill.event_store("accounts", Account, events=EVENTS)
    async with store.change("a1") as account:
        with pytest.raises(AttributeError):
            account.nickname  # noqa: B018  it is read, and there is none
        account.open("ann")
        await other.append("a1", [Deposited(1)])
    assert (await store.load("a1")).state == Account("ann", 1, [1])


async def test_a_block_inside_another_is_appended_first(store: EventStore) -> None:
    async with store.change("a1") as account:
        account.deposit(5)
        async with store.change("a1") as again:
            again.deposit(7)
    assert (await store.load("a1")).state.history == [7, 5]


async def test_after_its_block_the_state_takes_no_more_commands(store: EventStore) -> None:
    async with store.change("a1") as account:
        account.deposit(5)
    with pytest.raises(ConfigError, match="'deposit' was used after the block"):
        account.deposit(6)
    assert (await store.load("a1")).state.history == [5]


# -- repeated changes -------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after the window"])
async def test_a_change_with_an_id_is_stored_once_and_returns_the_same_each_time(
    mill: Mill, late: bool
) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS)

    async def change() -> Any:
        changing = store.change("a1", append_id="change-1")
        async with changing as account:
            account.deposit(5)
        return changing.result

    async def update() -> Any:
        return await store.update("a1", lambda account: Deposited(7), append_id="update-1")

    first = [await change(), await update()]
    await store.append("a1", [Deposited(100)])
    if late:  # the broker has forgotten the ids
        await forget_ids(mill, "accounts")
    again = [await change(), await update()]
    assert [(one.version, one.state.balance) for one in first] == [(1, 5), (2, 12)]
    assert [(one.version, one.state.balance) for one in again] == [(1, 5), (2, 12)]
    assert (await store.load("a1")).state.history == [5, 7, 100]


async def test_a_change_that_another_worker_has_stored_makes_no_wrong_snapshot(
    mill: Mill,
) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS, snapshot_every=5)
    other = await mill.event_store("accounts", Account, events=EVENTS)
    for _ in range(3):
        await store.append("a1", [Deposited(1)])
    change = store.change("a1", append_id="job-1")
    async with change as account:
        await other.append("a1", [Deposited(1000)])
        await other.append("a1", [Deposited(5)], append_id="job-1")
        account.deposit(5)
    assert change.result is not None
    assert change.result.state.balance == 1008
    assert (await store.load("a1")).state.balance == 1008


# -- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Closed:
    reason: str = ""


@dataclass(frozen=True)
class LargeDeposit(Deposited):
    pass


@dataclass
class Odd(Account):
    """Methods that a class of states can have, and those that it should not have."""

    class Limits:
        highest = 5

    def close(self) -> Closed:
        return Closed("an event that is not registered")

    def deposit_much(self) -> LargeDeposit:
        return LargeDeposit(5)

    def deposit_and_nothing(self) -> list[Any]:
        return [Deposited(1), None]

    def deposit_twice(self) -> Iterator[Deposited]:
        yield Deposited(1)
        yield Deposited(2)

    def earn(self, amount: int) -> None:
        self.balance += amount

    def earn_and_deposit(self, amount: int) -> Deposited:
        self.balance += amount
        return Deposited(amount)

    def first(self, amounts: Iterator[int]) -> Deposited:
        return Deposited(next(amounts))

    async def wait(self) -> Deposited:
        return Deposited(1)

    def __len__(self) -> int:
        return len(self.history)

    def __contains__(self, amount: int) -> bool:
        return amount in self.history

    def __iter__(self) -> Iterator[int]:
        return iter(self.history)


@pytest.fixture
async def odd(mill: Mill) -> EventStore:
    return await mill.event_store("accounts", Odd, events=EVENTS)


async def do(store: EventStore, act: Callable[[Any], Any]) -> None:
    async with store.change("a1") as account:
        act(account)


@pytest.mark.parametrize("command", ["close", "deposit_much", "deposit_and_nothing"])
async def test_a_decision_that_cannot_be_stored_is_refused(odd: EventStore, command: str) -> None:
    with pytest.raises(UnknownEvent, match="is not one of its events"):
        await do(odd, lambda account: getattr(account, command)())
    assert (await odd.topic.info()).messages == 0


async def test_a_command_may_yield_its_events(odd: EventStore) -> None:
    await do(odd, lambda account: account.deposit_twice())
    assert (await odd.load("a1")).state.history == [1, 2]


@pytest.mark.parametrize(
    "act",
    [
        lambda account: account.earn(5),
        lambda account: account.earn_and_deposit(5),
        lambda account: account.history.append(5),
    ],
    ids=["a method", "a method with an event", "a list"],
)
async def test_a_state_that_is_changed_without_an_event_is_refused(
    odd: EventStore, act: Callable[[Any], Any]
) -> None:
    with pytest.raises(ConfigError, match=r"was changed in a block .* without an event"):
        await do(odd, act)
    assert (await odd.topic.info()).messages == 0


async def test_an_asynchronous_command_is_refused(odd: EventStore) -> None:
    with pytest.raises(ConfigError, match="command 'wait' is asynchronous"):
        await do(odd, lambda account: account.wait())


async def test_a_command_takes_arguments_that_cannot_be_copied(odd: EventStore) -> None:
    await do(odd, lambda account: account.first(iter([3])))
    await do(odd, lambda account: account.first(n for n in (4,)))
    assert (await odd.load("a1")).state.history == [3, 4]


async def test_a_block_sees_the_state_as_an_object_of_its_class(odd: EventStore) -> None:
    async with odd.change("a1") as account:
        assert not account  # it has a length of 0
    await odd.append("a1", [Deposited(1), Deposited(2)])
    async with odd.change("a1") as account:
        assert account
        assert isinstance(account, Odd)
        assert account == Odd(balance=3, history=[1, 2])
        assert len(account) == 2
        assert 2 in account
        assert list(account) == [1, 2]
        assert str(account).startswith("Odd(")
        assert account.Limits.highest == 5


@pytest.mark.parametrize(
    "look",
    [bool, len, list, str, lambda account: 9 in account, lambda account: account == Odd()],
    ids=["bool", "len", "list", "str", "in", "equal"],
)
async def test_a_decision_by_any_look_at_the_state_is_checked_on_the_newer_one(
    odd: EventStore, mill: Mill, look: Callable[[Any], Any]
) -> None:
    other = await mill.event_store("accounts", Odd, events=EVENTS)

    async def decide() -> None:
        async with odd.change("a1") as account:
            look(account)
            account.deposit(100)
            await other.append("a1", [Deposited(9)])

    with pytest.raises(VersionConflict):
        await decide()
    assert (await odd.load("a1")).state.history == [9]
