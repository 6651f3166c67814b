"""Settings of a subscription, to and from the server's consumer."""

from __future__ import annotations

import json

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
