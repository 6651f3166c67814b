"""Settings of an ordered group: one frozen value, checked when it is created. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millstream.errors import ConfigError
from millstream.events.start import Start
from millstream.events.subject import check_name
from millstream.settings import hold_seconds

__all__ = ["GroupSettings"]

# Below this a busy machine's ordinary pauses would look like deaths.
LEASE_SECONDS_MIN: Final = 0.5
CONCURRENCY_MAX: Final = 10_000
# An open event costs about 20 bytes in the partition's record; see records.OPEN_MAX.
BUFFER_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings of one member of an ordered group; members of a group may differ, except `start`.

    Durations are given in seconds, as "1m30s" or as timedelta, and held in seconds.
    """

    start: Start = Start.ALL  # where the group starts when it is first used
    lease: float = 10.0  # seconds without a renewal until others take over
    concurrency: int = 16  # handlers of this member that may run at the same time
    max_attempts: int = 5  # attempts of one event by one owner; then its key is parked
    backoff: tuple[float, ...] = (
        0.5,
        1.0,
        2.0,
        5.0,
        10.0,
    )  # seconds before the 2nd, 3rd... one
    commit_every: float = 1.0  # at most this many seconds of work are repeated after a crash
    buffer: int = 1000  # events of one partition in memory; then reading waits
    key_buffer: int = 100  # events waiting for a failing one of their key; then it is parked early
    max_parked: int = 1000  # keys parked in one partition; beyond that, events are retried forever
    dead_letter: str | None = None  # topic of parked events; None: <topic>-<group>-dead
    fail_on_data_loss: bool = True  # stop at events that the broker has lost; False: go on

    def __post_init__(self) -> None:
        Start.checked(self.start)
        hold_seconds(self, "lease", "backoff", "commit_every")
        if self.start.policy == "last_per_subject":
            raise ConfigError("a group starts at ALL, NEW, LAST, an offset or a time")
        if not self.lease >= LEASE_SECONDS_MIN:
            raise ConfigError(f"lease {self.lease!r}: the shortest is {LEASE_SECONDS_MIN} seconds")
        if not self.commit_every > 0:
            raise ConfigError(f"commit_every {self.commit_every!r}: must be greater than zero")
        if not self.backoff:
            raise ConfigError("backoff (): give at least one delay")
        _check_count("concurrency", self.concurrency, CONCURRENCY_MAX)
        _check_count("max_attempts", self.max_attempts)
        _check_count("buffer", self.buffer, BUFFER_MAX)
        _check_count("key_buffer", self.key_buffer, self.buffer)
        _check_count("max_parked", self.max_parked, BUFFER_MAX)
        if self.dead_letter is not None:
            check_name("dead-letter topic", self.dead_letter)

    def delay_after(self, failures: int) -> float:
        """Seconds until the next attempt after `failures` failed ones."""
        return self.backoff[min(failures, len(self.backoff)) - 1]


def _check_count(name: str, value: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} {value!r}: must be a number of 1 or more")
    if most is not None and value > most:
        raise ConfigError(f"{name} {value:,}: at most {most:,}")
