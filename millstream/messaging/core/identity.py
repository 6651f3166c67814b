"""A client id that only one running client holds at a time.

A claim is the last message of the id's own subject in the stream `MILL_CLIENTS`; taking it is a
write that expects the sequence seen before, so exactly one of several claimants wins.

1. Read the claim. None, or a released one: go to 3.
2. Ask its holder. An answer: refused (IdentityTaken). None within `probe_timeout`: go on.
3. Write our claim, expecting what was read. If the holder has written a heartbeat meanwhile, it
   is alive: refused as well. If another claimant was faster: start again.
4. Notify the old holder, answer probes, and write again every `heartbeat` seconds; a write that
   finds another claim means that this holder was replaced (IdentityLost).

A holder that hung or was cut off notices its replacement when it runs again, up to one heartbeat
later. Where that is too late, store `epoch`, which only grows, with every write and check it there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from millstream.closing import AsyncClosing
from millstream.deadline import Deadline, now_ns
from millstream.errors import (
    ConfigError,
    ConnectError,
    IdentityLost,
    IdentityTaken,
    MillstreamError,
    NoResponders,
    RequestTimeout,
    TopicConflict,
    TopicNotFound,
    WrongSequence,
)
from millstream.events.subject import key_token
from millstream.settings import hold_seconds
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import PubAck, error_from
from millstream.wire.protocol import encode_headers, unique_token

__all__ = ["Identity", "IdentitySettings", "claim_identity"]

_log = logging.getLogger("millstream.messaging")

STREAM: Final = "MILL_CLIENTS"
CLAIM_PREFIX: Final = "$MILL.CLIENT"
PROBE_PREFIX: Final = "$MILL.PROBE"
# A claim without heartbeats is removed after this, so that ids used once do not accumulate.
CLAIM_SECONDS_MIN: Final = 3600
HEARTBEATS_PER_CLAIM: Final = 20
CLAIM_ATTEMPTS_MAX: Final = 10  # each lost attempt means that another claimant won
PROBE_PAUSE_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class IdentitySettings:
    """How quickly a dead holder is replaced, and how quickly a holder notices that it was."""

    heartbeat: float = 5.0  # seconds between writes of the holder
    probe_timeout: float = 2.0  # seconds a holder has to answer; covers a short reconnect
    replicas: int = 1  # of the stream with the claims, when it is created; 3 in a cluster

    def __post_init__(self) -> None:
        hold_seconds(self, "heartbeat", "probe_timeout")
        if not self.heartbeat > 0 or not self.probe_timeout > 0:
            raise ConfigError(
                f"heartbeat {self.heartbeat} and probe_timeout {self.probe_timeout} "
                f"must be more than 0 seconds"
            )
        if self.replicas not in (1, 3, 5):
            raise ConfigError(f"replicas {self.replicas}: use 1, 3 or 5")


class _Claim(msgspec.Struct):
    """What the stream stores about an id."""

    client_id: str
    instance: str  # of this one claim
    holder: str  # for people: connection name, host, process
    since: str
    released: bool = False


class Identity(AsyncClosing):
    """A client id held by this connection, until it is released, lost or the connection closes."""

    def __init__(
        self,
        connection: Connection,
        client_id: str,
        settings: IdentitySettings,
        on_lost: Callable[[IdentityLost], None] | None,
    ) -> None:
        self.client_id = client_id
        self.epoch = 0  # grows with every claim of this id
        self._connection = connection
        self._jetstream = JetStream(connection)
        self._settings = settings
        self._on_lost = on_lost
        self._token = key_token(client_id)
        self._subject = f"{CLAIM_PREFIX}.{self._token}"
        self._claim = _Claim(
            client_id,
            unique_token(),
            f"'{connection.settings.name}' on {socket.gethostname()}, process {os.getpid()}",
            datetime.fromtimestamp(now_ns() // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        self._probe = self._probe_subject(self._claim)
        self._sequence = 0  # of our last write
        self._lost: IdentityLost | None = None
        self._ended = asyncio.Event()
        self._check_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> bool:
        """Whether this connection holds the id, as far as it knows."""
        return self._task is not None and not self._ended.is_set()

    def check(self) -> None:
        """Raise IdentityLost when another client has taken over."""
        if self._lost is not None:
            raise self._lost

    async def ended(self) -> None:
        """Return when the id is no longer held; `check` says whether it was lost."""
        await self._ended.wait()

    async def release(self) -> None:
        """Give the id back, so that the next claimant does not wait for a probe."""
        if not self.held:
            return
        self._end()
        released = msgspec.structs.replace(self._claim, released=True)
        try:
            await self._write(released, self._sequence)
        except WrongSequence:
            found, sequence = await self._read()
            if found is not None and found.instance == self._claim.instance:
                await self._write(released, sequence)  # a heartbeat was in flight

    async def _leave(self, error: BaseException | None) -> None:
        with suppress(ConnectError, RequestTimeout, NoResponders):  # a probe will find us gone
            await self.release()

    # -- claiming -------------------------------------------------------------------------

    async def claim(self) -> None:
        """Claim the id and keep it alive; called by `mill.claim`."""
        await self._make_stream()
        interest = self._connection.subscribe(self._probe, self._answer_probe)
        try:
            await self._take()
        except BaseException:
            self._connection.unsubscribe(interest)
            raise
        self.epoch = self._sequence
        self._interest = interest
        self._connection.on_connected.append(self._check_now.set)
        self._connection.on_closed.append(self._end)
        self._task = asyncio.create_task(self._keep())

    async def _take(self) -> None:
        """Steps 1 to 3, repeated while other claimants are faster."""
        for _ in range(CLAIM_ATTEMPTS_MAX):
            found, expected = await self._read()
            if found is not None and found.instance == self._claim.instance:
                self._sequence = expected  # stored by an attempt whose reply was lost
                return
            if found is not None and not found.released and await self._answers(found):
                raise IdentityTaken(self.client_id, found.holder, found.since)
            if await self._replace(found, expected):
                return
        raise IdentityTaken(self.client_id, "one of several other claimants", "just now")

    async def _replace(self, found: _Claim | None, expected: int) -> bool:
        """Step 3: write our claim; False when another claimant was faster."""
        try:
            self._sequence = await self._write(self._claim, expected)
        except (WrongSequence, RequestTimeout):
            now, sequence = await self._read()
            if found and now and now.instance == found.instance and sequence > expected:
                raise IdentityTaken(self.client_id, now.holder, now.since) from None
            return False
        if found is not None and not found.released:
            self._notify(found)
        return True

    async def _make_stream(self) -> None:
        try:
            await self._jetstream.stream_info(STREAM)
        except TopicNotFound:
            config: dict[str, Any] = {
                "name": STREAM,
                "description": "which client holds which client id",
                "subjects": [f"{CLAIM_PREFIX}.*"],
                "max_msgs_per_subject": 1,
                "allow_msg_ttl": True,
                "allow_direct": True,
                "num_replicas": self._settings.replicas,
            }
            with suppress(TopicConflict):  # another claimant created it, with other replicas
                await self._jetstream.create_stream(config)

    async def _read(self) -> tuple[_Claim | None, int]:
        """The claim and its sequence; (None, 0) when there is none."""
        stored = await self._jetstream.get_message(STREAM, {"last_by_subj": self._subject})
        if stored is None:
            return None, 0
        return msgspec.json.decode(stored.payload, type=_Claim), stored.sequence

    async def _write(self, claim: _Claim, expected: int) -> int:
        """Store a claim if the last one is the expected; the sequence it got."""
        seconds = max(CLAIM_SECONDS_MIN, int(self._settings.heartbeat * HEARTBEATS_PER_CLAIM))
        headers = encode_headers(
            {
                "Nats-Expected-Last-Subject-Sequence": str(expected),
                "Nats-TTL": f"{seconds}s",
            }
        )
        _, answer = await self._connection.request(
            self._subject, msgspec.json.encode(claim), headers
        )
        ack = msgspec.json.decode(answer, type=PubAck)
        if ack.error is not None:
            raise error_from(ack.error)
        return ack.seq

    # -- probes ---------------------------------------------------------------------------

    def _probe_subject(self, claim: _Claim) -> str:
        return f"{PROBE_PREFIX}.{self._token}.{claim.instance}"

    async def _answers(self, other: _Claim) -> bool:
        """Whether the holder of a claim answers within the time of a short reconnect."""
        deadline = Deadline(self._settings.probe_timeout)
        while not deadline.passed:
            try:
                await self._connection.request(
                    self._probe_subject(other), timeout=max(deadline.left(), PROBE_PAUSE_SECONDS)
                )
                return True
            except NoResponders:
                await asyncio.sleep(deadline.left(at_most=PROBE_PAUSE_SECONDS))
            except RequestTimeout:
                return False
        return False

    def _notify(self, other: _Claim) -> None:
        """A probe without a reply subject means: check whether you still hold the id."""
        self._connection.publish(self._probe_subject(other).encode(), b"")

    def _answer_probe(self, _subject: bytes, reply: bytes, _headers: bytes, _data: bytes) -> None:
        if reply:
            self._connection.publish(reply, self._claim.holder.encode())
        else:
            self._check_now.set()

    # -- holding --------------------------------------------------------------------------

    async def _keep(self) -> None:
        while not self._ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.heartbeat):
                    await self._check_now.wait()
            self._check_now.clear()
            try:
                lost_to = await self._beat()
            except MillstreamError as error:
                # No other client can claim it either while the stream does not answer.
                _log.warning("client id '%s': no heartbeat: %s", self.client_id, error)
                continue
            if lost_to is not None:
                await self._give_up(lost_to)

    async def _beat(self) -> _Claim | None:
        """Write our claim again; returns the claim that replaced it, if there is one."""
        try:
            self._sequence = await self._write(self._claim, self._sequence)
            return None
        except WrongSequence:
            found, sequence = await self._read()
        except NoResponders:
            await self._make_stream()  # it was deleted; its ids are free
            found, sequence = await self._read()
        if found is None or found.instance == self._claim.instance:
            self._sequence = sequence
            self._check_now.set()
            return None
        return found

    async def _give_up(self, winner: _Claim) -> None:
        self._lost = IdentityLost(self.client_id, winner.holder)
        _log.warning("%s", self._lost)
        self._end()
        if self._on_lost is not None:
            self._on_lost(self._lost)
        else:
            await self._connection.close()

    def _end(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        self._connection.unsubscribe(self._interest)
        self._connection.on_connected.remove(self._check_now.set)
        self._connection.on_closed.remove(self._end)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()


async def claim_identity(
    connection: Connection,
    client_id: str,
    settings: IdentitySettings | None = None,
    on_lost: Callable[[IdentityLost], None] | None = None,
) -> Identity:
    """Claim a client id for this connection; IdentityTaken when its holder is alive.

    A holder that does not answer is replaced. When that happens to this one, `on_lost` is called;
    without it the connection is closed, so that two clients of one id do not work in parallel.
    Needs JetStream, and permission for `$MILL.>` where users are restricted.
    """
    if not client_id:
        raise ConfigError("a client id needs at least one character")
    identity = Identity(connection, client_id, settings or IdentitySettings(), on_lost)
    await identity.claim()
    return identity
