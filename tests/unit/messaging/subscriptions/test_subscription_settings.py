"""Settings of a subscription, to and from the server's consumer."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from millstream.errors import ConfigError
from millstream.events.event import Partition
from millstream.messaging.subscriptions.settings import (
    SubscriptionSettings,
    config_of,
    settings_of,
)

PARTITION = Partition("orders", "orders", 0, "orders")


def test_the_rate_limit_is_stored_as_what_it_is_a_limit_of_each_member() -> None:
    settings = SubscriptionSettings(member_rate_limit=2.5)
    config = config_of("s", settings, PARTITION)
    [stored] = config.metadata.values()
    assert json.loads(stored) == {"member_rate_limit": 2.5}
    assert settings_of(config).member_rate_limit == 2.5


def test_the_rate_limit_of_a_subscription_from_before_its_renaming_is_kept() -> None:
    config = config_of("s", SubscriptionSettings(member_rate_limit=2.5), PARTITION)
    config.metadata = dict.fromkeys(config.metadata, '{"rate_limit": 4}')
    assert settings_of(config).member_rate_limit == 4


def test_durations_are_given_as_topic_settings_take_them() -> None:
    given: dict[str, Any] = {"ack_wait": "1m30s", "inactive_after": timedelta(hours=1)}
    settings = SubscriptionSettings(**given, backoff=["500ms", 2])  # type: ignore[arg-type]
    assert (settings.ack_wait, settings.inactive_after) == (90.0, 3600.0)
    assert settings.backoff == (0.5, 2.0)


def test_a_single_key_is_not_taken_apart() -> None:
    assert SubscriptionSettings(keys="ann").keys == ("ann",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_deliver", "3", "max_deliver: '3' is not a whole number of 1 or more"),
        ("max_deliver", True, "max_deliver: True is not a whole number"),
        ("max_in_flight", 0, "max_in_flight: 0 is not a whole number"),
        ("ack_wait", "30", "ack_wait: not a duration: '30' has no unit. Write 30s"),
        ("ack_wait", {}, "ack_wait: {} is not a duration"),
        ("backoff", (1, -1), "backoff: not a duration: -1"),
        ("member_rate_limit", "5", "member_rate_limit '5': must be greater than zero"),
        ("start", "new", "start: 'new' is not a Start. Write Start.ALL, Start.NEW"),
    ],
)
def test_a_value_that_cannot_be_meant_is_named(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SubscriptionSettings(**{name: value})
    assert words in str(caught.value)
