"""Settings of a subscription: one frozen value, to and from the server's consumer. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Final, Literal, cast

from millstream.errors import ConfigError
from millstream.events.event import Partition
from millstream.events.start import Start
from millstream.events.subject import (
    COPIES_TOKEN,
    PACK_TOKEN,
    check_name,
    check_subject,
    copies_prefix,
    key_token,
    overlap,
    text_keys,
)
from millstream.messaging.topics.setting_forms import number_fault, several
from millstream.settings import hold_seconds
from millstream.wire.api import NANOSECONDS, ConsumerConfig

__all__ = ["AckMode", "SubscriptionSettings", "config_of", "differences", "settings_of"]

AckMode = Literal["explicit", "all", "none"]

_ACK_MODES: Final = ("explicit", "all", "none")
_META: Final = "millstream.subscription"
# The server requires a filter when it delivers the last message of each subject.
ALL_SUBJECTS: Final = ">"
_OURS: Final = (
    *("keys", "backoff", "max_deliver", "member_rate_limit", "dead_letter", "fail_on_data_loss"),
)
ACK_WAIT_DEFAULT: Final = 30.0
IN_FLIGHT_DEFAULT: Final = 10_000
# Retries without a delay would use up all deliveries within milliseconds.
BACKOFF_DEFAULT: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class SubscriptionSettings:
    """Settings of a durable subscription, shared by all its members.

    Durations are given in seconds, as "1m30s" or as timedelta, and held in seconds.
    """

    start: Start = Start.ALL  # where it starts when it is created
    keys: tuple[str, ...] = ()  # only events of these keys; empty: all
    subjects: tuple[str, ...] = ()  # only messages on these subject patterns; not with keys
    ack: AckMode = "explicit"  # "all": an ack covers everything before; "none": at most once
    ack_wait: float = (
        ACK_WAIT_DEFAULT  # seconds: the lease; an event not settled by then is redelivered
    )
    backoff: tuple[float, ...] = ()  # seconds before the 2nd, 3rd... delivery after a nack
    max_deliver: int | None = None  # deliveries of one event; then it becomes a dead letter
    max_in_flight: int = IN_FLIGHT_DEFAULT  # delivered and unsettled messages, all members together
    member_rate_limit: float | None = None  # events per second that each member takes at most
    dead_letter: str | None = None  # topic for dead letters; None: <topic>-<subscription>-dead
    inactive_after: float | None = None  # seconds unused until the server deletes it; None: never
    description: str = ""
    fail_on_data_loss: bool = True  # stop at events that the broker has lost; False: go on

    def __post_init__(self) -> None:
        Start.checked(self.start)
        object.__setattr__(self, "keys", text_keys(self.keys))
        for name in ("subjects", "backoff"):
            object.__setattr__(self, name, several(getattr(self, name)))
        hold_seconds(self, "ack_wait", "backoff", "inactive_after")
        if self.keys and self.subjects:
            raise ConfigError("choose events by keys or by subjects, not both")
        for pattern in self.subjects:
            check_subject(pattern, wildcards=True)
        if self.ack not in _ACK_MODES:
            raise ConfigError(f"ack {self.ack!r}: choose one of {', '.join(_ACK_MODES)}")
        _positive("ack_wait", self.ack_wait)
        for name in ("max_in_flight", "max_deliver"):
            count = getattr(self, name)
            if count is not None and (fault := number_fault(count)) is not None:
                raise ConfigError(f"{name}: {fault}")
        if self.member_rate_limit is not None:
            _positive("member_rate_limit", self.member_rate_limit)
        if self.dead_letter is not None:
            check_name("dead-letter topic", self.dead_letter)
        if self.ack == "none" and self.max_deliver is not None:
            raise ConfigError("ack='none' never redelivers, so max_deliver cannot be used with it")

    def delay_after(self, attempt: int) -> float:
        """Seconds until the next delivery after attempt number `attempt` (from 1) failed."""
        delays = self.backoff or BACKOFF_DEFAULT
        return delays[min(attempt, len(delays)) - 1]


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{name} {value!r}: must be greater than zero")


def config_of(name: str, settings: SubscriptionSettings, partition: Partition) -> ConsumerConfig:
    """The consumer that serves a subscription on one partition.

    The server's max_deliver stays unlimited, because it would drop the event with only a
    transient notice. The members count, and store a dead letter before they settle the event.
    """
    config = ConsumerConfig(
        durable_name=name,
        name=name,
        description=settings.description,
        deliver_policy=settings.start.policy,
        opt_start_seq=settings.start.offset,
        opt_start_time=settings.start.rfc3339,
        ack_policy=settings.ack,
        max_deliver=-1,
        metadata=_metadata(settings),
    )
    if settings.ack != "none":
        config.ack_wait = int(settings.ack_wait * NANOSECONDS)
        config.max_ack_pending = settings.max_in_flight
    if settings.inactive_after is not None:
        config.inactive_threshold = int(settings.inactive_after * NANOSECONDS)
    patterns = _filters(name, settings, partition)
    if len(patterns) == 1:
        config.filter_subject = patterns[0]
    else:
        config.filter_subjects = patterns
    return config


def _filters(name: str, settings: SubscriptionSettings, partition: Partition) -> list[str]:
    """What the server delivers: what was chosen, and what is redriven for this subscription."""
    chosen = _chosen(settings, partition)
    if not chosen or partition.prefix is None:
        return chosen
    copies = f"{copies_prefix(partition.prefix, name)}.>"
    if any(overlap(pattern, copies) for pattern in chosen):
        return chosen  # the server refuses filters that overlap
    return [*chosen, copies]


def _chosen(settings: SubscriptionSettings, partition: Partition) -> list[str]:
    if settings.subjects:
        return list(settings.subjects)
    if not settings.keys:
        return [ALL_SUBJECTS] if settings.start == Start.LAST_PER_KEY else []
    if partition.prefix is None:
        raise ConfigError("a foreign stream has no keys; choose by subjects instead")
    tokens = sorted({key_token(key) for key in settings.keys})
    return [*(f"{partition.prefix}.{t}" for t in tokens), f"{partition.prefix}.{PACK_TOKEN}.>"]


def _metadata(settings: SubscriptionSettings) -> dict[str, str]:
    """Settings the server does not have, stored with the consumer so that all members agree."""
    ours = {name: getattr(settings, name) for name in _OURS}
    given = {n: value for n, value in ours.items() if value not in (None, ()) and value is not True}
    return {_META: json.dumps(given, sort_keys=True)} if given else {}


def settings_of(config: ConsumerConfig) -> SubscriptionSettings:
    """The settings that a consumer was created with; foreign consumers are read as they are."""
    try:
        ours = json.loads(config.metadata.get(_META, "{}"))
    except ValueError:
        ours = {}
    patterns = [config.filter_subject] if config.filter_subject else config.filter_subjects
    copies = f".{COPIES_TOKEN}.{key_token(config.durable_name)}.>"
    patterns = [pattern for pattern in patterns if not pattern.endswith(copies)]
    explicit = config.ack_policy not in _ACK_MODES
    return SubscriptionSettings(
        start=_start_of(config),
        keys=tuple(ours.get("keys", ())),
        subjects=() if ours.get("keys") or patterns == [ALL_SUBJECTS] else tuple(patterns),
        ack="explicit" if explicit else cast(AckMode, config.ack_policy),
        ack_wait=config.ack_wait / NANOSECONDS if config.ack_wait else ACK_WAIT_DEFAULT,
        backoff=tuple(ours.get("backoff", ())),
        max_deliver=ours.get("max_deliver"),
        max_in_flight=config.max_ack_pending if config.max_ack_pending > 0 else IN_FLIGHT_DEFAULT,
        member_rate_limit=ours.get("member_rate_limit", ours.get("rate_limit")),  # its old name
        dead_letter=ours.get("dead_letter"),
        inactive_after=config.inactive_threshold / NANOSECONDS or None,
        description=config.description,
        fail_on_data_loss=ours.get("fail_on_data_loss", True),
    )


def _start_of(config: ConsumerConfig) -> Start:
    if config.opt_start_time is not None:
        return Start.at_time(datetime.fromisoformat(config.opt_start_time))
    return Start(config.deliver_policy, config.opt_start_seq)


def differences(wanted: SubscriptionSettings, found: SubscriptionSettings) -> list[str]:
    """Which settings differ, each as `name: wanted x, found y`."""
    pairs = [(f.name, getattr(wanted, f.name), getattr(found, f.name)) for f in fields(wanted)]
    return [f"{name}: wanted {w!r}, found {f!r}" for name, w, f in pairs if w != f]
