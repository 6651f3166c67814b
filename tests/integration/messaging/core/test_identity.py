"""Client ids: one living holder at a time, also when processes hang, die or race."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from millstream.broker import Permissions, User
from millstream.deadline import Deadline
from millstream.errors import (
    ConfigError,
    ConnectionClosed,
    IdentityLost,
    IdentityTaken,
    PermissionDenied,
    TopicNotFound,
)
from millstream.messaging.core.identity import STREAM, Identity, IdentitySettings, claim_identity
from millstream.settings import Secret
from millstream.testing import running_broker
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from tests.integration.messaging.topic_kit import eventually

Connect = Callable[..., Awaitable[Connection]]
Until = Callable[..., Awaitable[None]]

QUICK = IdentitySettings(heartbeat=0.2, probe_timeout=0.3)  # for claimants of a dead one's id
PATIENT = IdentitySettings(heartbeat=0.2, probe_timeout=30)  # a living one answers in this time

HOLDER = """
import asyncio, sys
from millstream.messaging.core.identity import IdentitySettings, claim_identity
from millstream.settings import ConnectionSettings
from millstream.wire.aio.connection import Connection

async def main():
    connection = Connection(ConnectionSettings(urls=(sys.argv[1],)))
    await connection.open()
    identity = await claim_identity(
        connection, "worker-1", IdentitySettings(heartbeat=0.2, probe_timeout=0.4)
    )
    sys.stdout.write(f"{identity.epoch}\\n")
    sys.stdout.flush()
    await identity.ended()
    try:
        identity.check()
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}\\n")
        sys.stdout.flush()

asyncio.run(main())
"""


@pytest.fixture
def holder(millstream_url: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the id `worker-1`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, millstream_url], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdigit()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


async def test_a_second_claimant_is_refused_while_the_first_answers(
    connection: Connection, other: Connection
) -> None:
    async with await claim_identity(connection, "worker-1", QUICK) as first:
        deadline = Deadline(PATIENT.probe_timeout)
        with pytest.raises(
            IdentityTaken, match=r"'worker-1' has been held by 'millstream' on .*it is alive"
        ):
            await claim_identity(other, "worker-1", PATIENT)
        assert deadline.left() > 10, "the time for an answer is not waited out"
        assert first.held
        async with await claim_identity(other, "worker-2", QUICK) as second:
            assert second.held


async def test_a_released_id_is_free_immediately(connection: Connection, other: Connection) -> None:
    async with await claim_identity(connection, "a", QUICK) as first:
        pass
    deadline = Deadline(PATIENT.probe_timeout)
    async with await claim_identity(other, "a", PATIENT) as second:
        assert deadline.left() > 10, "nobody had to be asked"
        assert second.epoch > first.epoch
    assert not first.held
    first.check()


async def test_a_process_that_was_killed_is_replaced(
    connection: Connection, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(IdentityTaken, match=f"process {holder.pid}"):
        await claim_identity(connection, "worker-1", PATIENT)
    holder.kill()
    await asyncio.to_thread(holder.wait)
    async with await claim_identity(connection, "worker-1", QUICK) as identity:
        assert identity.held


async def test_a_frozen_process_is_replaced_and_notices_when_it_wakes_up(
    connection: Connection, holder: subprocess.Popen[str]
) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    async with await claim_identity(connection, "worker-1", QUICK) as identity:
        os.kill(holder.pid, signal.SIGCONT)
        assert holder.stdout is not None
        told = await asyncio.to_thread(holder.stdout.readline)
        assert told.strip() == "IdentityLost"
        assert await asyncio.to_thread(holder.wait, 30) == 0
        await asyncio.sleep(2 * QUICK.heartbeat)
        assert identity.held


async def test_losing_the_id_closes_the_connection_by_default(
    connect: Connect, until: Until
) -> None:
    careless, careful, claimant = await connect(), await connect(), await connect()
    rarely = IdentitySettings(heartbeat=60)
    told: list[IdentityLost] = []
    first = await claim_identity(careless, "one", rarely)
    second = await claim_identity(careful, "two", rarely, told.append)
    for identity in (first, second):
        await deafen(identity)
        await claim_identity(claimant, identity.client_id, QUICK)
        assert identity.held, "it cannot know yet"
        link = identity._connection._link
        assert link is not None
        link.abort()  # after a reconnect it checks
    await until(lambda: careless.closed and told)
    with pytest.raises(IdentityLost, match="'one' was taken over by 'millstream'"):
        first.check()
    with pytest.raises(ConnectionClosed):
        await careless.flush()
    assert told[0].client_id == "two"
    await careful.flush()


async def deafen(identity: Identity) -> None:
    """Its probes stay unanswered, as if the way to it were cut."""
    identity._connection.unsubscribe(identity._interest)
    await identity._connection.flush()


async def test_a_holder_whose_heartbeats_continue_is_alive_even_if_probes_do_not_reach_it(
    connection: Connection, other: Connection, until: Until
) -> None:
    async with await claim_identity(connection, "deaf", QUICK) as identity:
        await deafen(identity)

        class Claimant(Identity):
            async def _answers(self, claim: Any) -> bool:
                """Wait for an answer at least until the next heartbeat."""
                before = identity._sequence
                answered = await super()._answers(claim)
                await until(lambda: identity._sequence > before)
                return answered

        with pytest.raises(IdentityTaken, match=r"held by .millstream. on .*it is alive"):
            await Claimant(other, "deaf", QUICK, None).claim()
        assert identity.held


async def test_exactly_one_of_many_concurrent_claimants_wins(connect: Connect) -> None:
    connections = [await connect() for _ in range(8)]
    results = await asyncio.gather(
        *(claim_identity(connection, "race", PATIENT) for connection in connections),
        return_exceptions=True,
    )
    winners = [result for result in results if isinstance(result, Identity)]
    refused = [result for result in results if isinstance(result, IdentityTaken)]
    assert (len(winners), len(refused)) == (1, 7)
    await winners[0].release()


async def test_of_many_claimants_of_a_dead_id_exactly_one_wins(connect: Connect) -> None:
    connection = await connect()
    dead = await claim_identity(connection, "heir", QUICK)
    await connection.close()

    class Claimant(Identity):
        async def _answers(self, claim: Any) -> bool:
            """Wait for the winner longer than for the dead one."""
            self._settings = QUICK if claim.instance == dead._claim.instance else PATIENT
            return await super()._answers(claim)

    claimants = [Claimant(await connect(), "heir", QUICK, None) for _ in range(5)]
    results = await asyncio.gather(
        *(claimant.claim() for claimant in claimants), return_exceptions=True
    )
    (winner,) = [claimant for claimant in claimants if claimant.held]
    assert [type(result) for result in results].count(IdentityTaken) == 4
    await winner.release()


async def test_a_holder_keeps_its_id_across_a_restart_of_the_broker(
    connect: Connect, until: Until
) -> None:
    async with running_broker() as broker:
        holder, claimant = [await connect(broker.url, request_timeout=30.0) for _ in range(2)]
        async with await claim_identity(holder, "steady", PATIENT) as identity:
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            with pytest.raises(IdentityTaken):
                await claim_identity(claimant, "steady", PATIENT)
            before = identity._sequence
            await until(lambda: identity._sequence > before)
            assert identity.held


async def test_a_claim_that_vanished_from_the_stream_is_stored_again(
    connection: Connection, other: Connection
) -> None:
    async with await claim_identity(connection, "again", QUICK) as identity:
        jetstream = JetStream(connection)

        async def stored() -> bool:
            try:
                found = await jetstream.get_message(STREAM, {"last_by_subj": identity._subject})
            except TopicNotFound:
                return False
            return found is not None

        await jetstream.purge_stream(STREAM)
        await eventually(stored, True)
        await jetstream.delete_stream(STREAM)
        await eventually(stored, True)
        with pytest.raises(IdentityTaken):
            await claim_identity(other, "again", PATIENT)
        assert identity.held


async def test_claims_expire_automatically_long_after_the_last_heartbeat(
    connection: Connection,
) -> None:
    async with await claim_identity(connection, "old.and *odd>", QUICK) as identity:
        stored = await JetStream(connection).get_message(STREAM, {"last_by_subj": "$MILL.CLIENT.>"})
        assert stored is not None
        assert b"Nats-TTL: 3600s" in stored.headers
        assert identity.held


async def test_an_empty_id_and_settings_that_mean_nothing_are_refused(
    connection: Connection,
) -> None:
    with pytest.raises(ConfigError, match="at least one character"):
        await claim_identity(connection, "")
    with pytest.raises(ConfigError, match="heartbeat"):
        IdentitySettings(heartbeat=0)
    with pytest.raises(ConfigError, match="replicas"):
        IdentitySettings(replicas=2)


async def test_a_user_without_permission_gets_an_error(connect: Connect) -> None:
    user = User("limited", Secret("pw"), permissions=Permissions(publish_deny=("$MILL.>",)))
    async with running_broker(users=(user,)) as broker:
        connection = await connect(broker.url, user="limited", password=Secret("pw"))
        with pytest.raises(PermissionDenied, match=r"may not publish to '\$MILL\.CLIENT"):
            await claim_identity(connection, "x", QUICK)
