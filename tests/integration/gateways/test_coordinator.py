"""Groups over restarts, pauses and other gateways, with a real broker behind them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest

import millstream
from millstream import Mill
from millstream.errors import MillstreamError
from millstream.gateways.kafka.coordinator import Coordinator, now_ms
from millstream.gateways.kafka.group_members import GroupBounds, GroupState
from millstream.gateways.kafka.group_store import GroupTable
from millstream.gateways.kafka.protocol import Api
from millstream.tables import Table
from tests.integration.gateways.group_wire import FakeCatalog, Wire

WEEK = GroupBounds().offsets_retention


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url, request_timeout=30) as mill:
        yield mill


@pytest.fixture
def catalog() -> FakeCatalog:
    return FakeCatalog(t=4, other=1)


class Gateways:
    """Coordinators, one after the other or side by side."""

    def __init__(self, mill: Mill, catalog: FakeCatalog) -> None:
        self._mill, self._catalog = mill, catalog
        self.clock = Clock()
        self.running: list[Coordinator] = []

    async def start(self, clock: Callable[[], float] | None = None) -> Wire:
        """Another gateway. Those before are not stopped: as if they were killed, or paused."""
        limits = GroupBounds(initial_delay=0, min_session=0.1)
        coordinator = Coordinator(self._mill, limits, clock or self.clock)
        await coordinator.start()
        self.running.append(coordinator)
        return Wire(coordinator, self._catalog)

    async def stop(self) -> None:
        for coordinator in self.running:
            await coordinator.stop()

    @property
    def last(self) -> Coordinator:
        return self.running[-1]


@pytest.fixture
async def gateways(mill: Mill, catalog: FakeCatalog) -> AsyncIterator[Gateways]:
    gateways = Gateways(mill, catalog)
    yield gateways
    await gateways.stop()


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 -- nothing says when it becomes true
        await asyncio.sleep(0.01)


# -- the gateway is killed ----------------------------------------------------------------


async def test_members_continue_after_the_gateway_was_killed(gateways: Gateways) -> None:
    before = await gateways.start()
    joined = await before.member()
    await before.commit({("t", 0): 5}, joined)
    after = await gateways.start()
    assert await after.beat(joined) == "none"
    assert await after.fetch(("t", 0)) == {("t", 0): 5}
    assert await after.commit({("t", 0): 6}, joined) == {("t", 0): "none"}
    again = await after.sync(joined)
    assert again.assignment == f"for {joined.member_id}".encode()
    group = gateways.last.find("g")
    assert group is not None
    assert (group.state, group.generation) == (GroupState.STABLE, joined.generation_id)


async def test_a_generation_that_was_begun_is_completed_by_the_next_gateway(
    gateways: Gateways,
) -> None:
    before = await gateways.start()
    joined = await before.join()
    after = await gateways.start()
    synced = await after.sync(joined)
    assert synced.error_code.name == "none"
    assert await after.beat(joined) == "none"


async def test_a_static_member_that_was_started_again_is_known_to_the_next_gateway(
    gateways: Gateways,
) -> None:
    before = await gateways.start()
    await before.member(group_instance_id="s1")
    back = await before.join(group_instance_id="s1")
    after = await gateways.start()
    assert await after.beat(back) == "none"


async def test_members_that_are_gone_time_out_with_the_next_gateway(gateways: Gateways) -> None:
    before = await gateways.start()
    joined = await before.member(session_timeout=timedelta(seconds=0.5))
    after = await gateways.start(time.monotonic)
    group = gateways.last.find("g")
    assert group is not None
    assert group.state is GroupState.STABLE
    await until(lambda: not group.members)
    assert await after.beat(joined) == "unknown_member_id"
    assert await after.commit({("t", 0): 1}) == {("t", 0): "none"}


# -- the gateway is paused ----------------------------------------------------------------


async def test_a_pause_of_the_gateway_removes_nobody(gateways: Gateways) -> None:
    wire = await gateways.start()
    joined = await wire.member()
    group = gateways.last.find("g")
    assert group is not None
    await asyncio.sleep(0)  # the timers look at the clock
    gateways.clock.now += 300
    assert group.due < gateways.clock.now
    await until(lambda: group.due > gateways.clock.now)
    assert await wire.beat(joined) == "none"


# -- another gateway ----------------------------------------------------------------------


async def test_a_gateway_that_was_overtaken_reads_what_the_other_wrote(
    gateways: Gateways,
) -> None:
    stale = await gateways.start()
    await stale.commit({("t", 0): 1})
    fresh = await gateways.start()
    await fresh.commit({("t", 0): 5, ("t", 1): 6})
    assert await stale.commit({("t", 0): 2}) == {("t", 0): "not_coordinator"}
    await until(lambda: gateways.running[0].offsets("g") is not None)
    assert await stale.fetch() == {("t", 0): 5, ("t", 1): 6}
    assert await stale.commit({("t", 0): 7}) == {("t", 0): "none"}


async def test_members_that_wait_at_a_gateway_that_was_overtaken_ask_again(
    gateways: Gateways,
) -> None:
    stale = await gateways.start()
    joined = await stale.member()
    fresh = await gateways.start()
    new = await fresh.member(member_id=joined.member_id)
    refused = await stale.join(member_id=joined.member_id)
    assert refused.error_code.name == "not_coordinator"
    loading = await stale.join(member_id=joined.member_id)
    assert loading.error_code.name == "coordinator_load_in_progress"
    assert await stale.beat(joined) == "coordinator_load_in_progress"
    await until(lambda: gateways.running[0].find("g"))
    assert await stale.beat(new) == "none"


# -- the broker ---------------------------------------------------------------------------


async def test_what_the_broker_does_not_store_is_refused_and_not_seen(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = await gateways.start()
    joined = await wire.member()
    put = Table.put

    async def refuse(*_: Any, **__: Any) -> int:
        raise MillstreamError("the disk is full")

    monkeypatch.setattr(Table, "put", refuse)
    unavailable = "coordinator_not_available"
    assert await wire.commit({("t", 0): 1}, joined) == {("t", 0): unavailable}
    assert await wire.fetch() == {}
    again = await wire.join(member_id=joined.member_id)
    assert again.error_code.name == unavailable
    monkeypatch.setattr(Table, "put", put)
    assert await wire.fetch() == {}
    again = await wire.member(member_id=joined.member_id)
    assert await wire.commit({("t", 0): 1}, again) == {("t", 0): "none"}


async def test_a_group_that_cannot_be_deleted_now_stays(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = await gateways.start()
    await wire.commit({("t", 0): 1})

    async def refuse(*_: Any, **__: Any) -> int:
        raise MillstreamError("no answer")

    monkeypatch.setattr(Table, "delete", refuse)
    found = await wire(Api.DELETE_GROUPS, groups_names=("g",))
    assert found.results[0].error_code.name == "coordinator_not_available"
    assert await wire.fetch() == {("t", 0): 1}
    assert await wire.commit({("t", 0): 2}) == {("t", 0): "none"}


# -- what nobody needs any more -----------------------------------------------------------


async def test_offsets_of_groups_that_nobody_uses_expire(gateways: Gateways, mill: Mill) -> None:
    wire = await gateways.start()
    await wire.commit({("t", 0): 1}, group="simple")
    joined = await wire.member("used")
    await wire.commit({("t", 0): 1, ("other", 0): 1}, joined, "used")
    left = await wire.member("left")
    await wire.commit({("t", 0): 1}, left, "left")
    await wire(Api.LEAVE_GROUP, group_id="left", members=[{"member_id": left.member_id}])
    coordinator = gateways.last

    async def names() -> set[str]:
        return {name for name, _ in coordinator.all()}

    await until(lambda: (group := coordinator.find("left")) and group.generation == 2)
    await coordinator.clean(now_ms())
    assert await names() == {"simple", "used", "left"}
    await coordinator.clean(now_ms() + int(WEEK * 1000) + 1)
    assert await names() == {"used"}
    assert await wire.fetch(group="used") == {("t", 0): 1}
    store = GroupTable(mill)
    await store.start()
    assert set(await store.load_all()) == {"used"}


async def test_a_stop_answers_all_that_wait_and_keeps_everything(
    gateways: Gateways, mill: Mill
) -> None:
    wire = await gateways.start()
    joined = await wire.member()
    waiting = asyncio.ensure_future(wire.join())
    commit = asyncio.ensure_future(wire.commit({("t", 0): 9}, joined))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await gateways.last.stop()
    assert (await waiting).error_code.name == "coordinator_not_available"
    assert await commit == {("t", 0): "none"}
    after = await gateways.start()
    assert await after.fetch() == {("t", 0): 9}
    assert await after.beat(joined) == "none"
