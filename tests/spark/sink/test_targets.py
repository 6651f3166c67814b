"""The topic of a sink is looked at for every batch, however often it was seen before."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from millstream.errors import ConfigError, TopicNotFound
from millstream.settings import ConnectionSettings
from millstream.spark.sink.targets import find_target
from tests.spark.conftest import Account


def test_a_topic_that_was_created_again_or_changed_is_written_as_it_is_now(
    account: Account,
) -> None:
    settings = ConnectionSettings(urls=(account.url,))

    def change(work: Any) -> None:
        account.run(work)

    account.topic("target")
    first = find_target(settings, "target")
    assert find_target(settings, "target") == first
    assert (first.partitions, first.demands, first.takes_packs) == (1, False, True)

    change(lambda mill: mill.delete_topic("target"))
    with pytest.raises(TopicNotFound):
        find_target(settings, "target")

    account.topic("target", partitions=3)
    assert find_target(settings, "target").partitions == 3

    change(lambda mill: mill.delete_topic("target"))
    account.topic("target", packs=False)
    assert not find_target(settings, "target").takes_packs

    change(lambda mill: mill.delete_topic("target"))
    account.topic("target", retention="interest")
    with pytest.raises(ConfigError, match="has retention interest"):
        find_target(settings, "target")

    change(lambda mill: mill.delete_topic("target"))
    account.topic("target", durability="periodic", max_age=timedelta(days=1))
    target = find_target(settings, "target")
    assert target.demands
    assert target.max_payload == first.max_payload
