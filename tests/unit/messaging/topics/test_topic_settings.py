"""Topic settings: forms they are given in, what is refused, the way to streams and back."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from millstream.errors import ConfigError
from millstream.events.event import PublishOptions
from millstream.messaging.topics.differences import conflict, differences
from millstream.messaging.topics.settings import (
    Discard,
    Origin,
    Retention,
    Storage,
    TopicSettings,
)
from millstream.messaging.topics.stream_config import (
    changed_config,
    from_stream_config,
    identity_of,
    may_hold_packs,
    resolved,
    to_stream_configs,
)

WEEK = timedelta(days=7)


@pytest.mark.parametrize("given", ["7d", "168h", 604_800, WEEK])
def test_a_duration_in_any_form_is_stored_as_a_timedelta(given: str | int) -> None:
    assert TopicSettings(max_age=given).max_age == WEEK


@pytest.mark.parametrize("given", ["10GiB", "10240MiB", 10 * 1024**3])
def test_a_size_in_any_form_is_stored_in_bytes(given: str | int) -> None:
    assert TopicSettings(max_bytes=given).max_bytes == 10 * 1024**3


@pytest.mark.parametrize("given", ["workqueue", "work_queue", "Work-Queue", Retention.WORK_QUEUE])
def test_a_choice_is_read_with_any_separator(given: str) -> None:
    assert TopicSettings(retention=given).retention is Retention.WORK_QUEUE


def test_an_origin_may_be_a_name() -> None:
    assert TopicSettings(mirror="orders").mirror == Origin("orders")
    assert TopicSettings(sources=["a", Origin("b")]).sources == (Origin("a"), Origin("b"))


def test_settings_are_frozen_hashed_copied_and_pickled() -> None:
    settings = TopicSettings(max_age="7d", metadata={"team": "shop"}, sources=["a"])
    with pytest.raises(FrozenInstanceError):
        settings.partitions = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        settings.metadata["team"] = "x"  # type: ignore[index]
    assert {settings, copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))} == {settings}
    assert replace(settings, max_age="1h").max_age == timedelta(hours=1)


def test_the_repr_shows_only_what_was_set_and_can_be_given_again() -> None:
    settings = TopicSettings(partitions=2, max_age="36h", storage="memory")
    assert repr(settings) == "TopicSettings(partitions=2, max_age='1d12h', storage='memory')"
    assert eval(repr(settings)) == settings


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"partitions": 0}, "partitions: 0 is not a whole number of 1 or more"),
        ({"partitions": True}, "partitions: True"),
        ({"partitions": 5000}, "more than the maximum of 1,024"),
        ({"replicas": 6}, "more than the maximum of 5"),
        ({"replicas": "3"}, "replicas: '3'"),
        ({"max_age": "a week"}, "max_age: not a duration: 'a week'. Write it like"),
        ({"max_age": "7"}, "max_age: not a duration: '7' has no unit. Write 7s for seconds or 7d"),
        ({"max_age": -1}, "max_age: not a duration: -1"),
        ({"max_age": timedelta(-1)}, "negative"),
        ({"max_age": "1ms"}, "below the minimum of 100ms"),
        ({"max_bytes": "lots"}, "max_bytes: 'lots' is not a size"),
        ({"max_bytes": 0}, "max_bytes: 0"),
        ({"history": 0}, "history: 0"),
        ({"max_message_size": "2GiB"}, "max_message_size"),
        ({"retention": "forever"}, "not one of limits, interest, workqueue"),
        ({"deny_delete": "yes"}, "not True or False"),
        ({"description": None}, "not a string"),
        ({"description": "x" * 5000}, "longer than 4,096 bytes"),
        ({"metadata": {"millstream.topic": "x"}}, "reserved for Millstream"),
        ({"metadata": {"_nats.ver": "x"}}, "reserved for Millstream"),
        ({"metadata": {"a": 1}}, "must both be strings"),
        ({"metadata": {"a": "x" * 200_000}}, "are more than"),
        ({"prefix": "a.*"}, "wildcard"),
        ({"prefix": "$JS.x"}, "$, which is reserved"),
        ({"discard": "new"}, "no limit is set"),
        ({"discard": "new", "max_messages": 5, "schedules": True}, "schedules: discard 'new'"),
        ({"discard_new_per_key": True, "history": 1}, "needs discard='new'"),
        ({"duplicate_window": "2h", "max_age": "1h"}, "longer than max_age, 1h"),
        ({"duplicate_window": 0}, "below the minimum of 100ms"),
        ({"compression": "s2", "storage": "memory"}, "compression: requires storage='file'"),
        ({"early_ack": True, "storage": "memory"}, "early_ack: requires storage='file'"),
        ({"early_ack": True, "replicas": 3}, "requires replicas=1"),
        ({"early_ack": True, "atomic": True}, "atomic: early_ack excludes it"),
        ({"deny_purge": True, "rollup": True}, "rollup: deny_purge excludes it"),
        ({"deny_purge": True, "schedules": True}, "schedules: deny_purge excludes it"),
        ({"rollup": False, "schedules": True}, "schedules: it needs rollup"),
        ({"packs": True, "history": 1}, "packs: the broker cannot keep a history"),
        ({"packs": False, "mirror": "a"}, "packs: a copy has what its origin has"),
        ({"wire_format": "xml"}, "not one of avro, json, protobuf"),
        ({"wire_format": "json", "mirror": "a"}, "schema of its origin"),
        ({"guarded": True}, "against a schema"),
        ({"marker_ttl": 60}, "needs history=1"),
        ({"marker_ttl": 0.5, "history": 1}, "below the minimum of 1s"),
        ({"marker_ttl": 60, "history": 1, "deny_purge": True}, "needs message_ttl and rollup"),
        ({"marker_ttl": 60, "history": 1, "mirror": "a"}, "cannot add markers"),
        ({"mirror": "a", "sources": ["b"]}, "give one of them"),
        ({"mirror": "a", "prefix": "b"}, "subjects of its origin"),
        ({"mirror": "a", "discard": "new", "max_messages": 5}, "stop a full copy silently"),
        ({"sources": ["a"], "discard": "new", "max_bytes": 5}, "stop a full copy silently"),
        ({"mirror": "a", "duplicate_window": 60}, "duplicates included"),
        ({"mirror": "a", "atomic": True}, "nothing can be published to a copy"),
        ({"mirror": Origin("a", filter="k")}, "would answer reads of its origin"),
        ({"mirror": Origin("a", partitions=2)}, "as many as its origin, 2, not 1"),
        ({"sources": ["a", "a"]}, "given twice"),
        ({"sources": "a"}, "a list of topics"),
        ({"sources": [3]}, "name of a topic"),
        ({"sources": [Origin("a", partitions=3)], "partitions": 2}, "keeps its partition only"),
    ],
)
def test_invalid_settings_are_refused_with_the_reason(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TopicSettings(**given)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"topic": "a.b"},
        {"topic": ""},
        {"topic": "a", "domain": "x y"},
        {"topic": "a", "start": 0},
        {"topic": "a", "start": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"topic": "a", "filter": "a..b"},
        {"topic": "a", "partitions": 0},
        {"topic": "a", "partitions": 2, "foreign": True},
    ],
)
def test_an_invalid_origin_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Origin(**given)


def test_features_that_only_affect_the_own_event_are_on_wherever_the_server_allows_them() -> None:
    plain, copied = TopicSettings(), TopicSettings(mirror="a")
    assert all(map(plain.allows, ("message_ttl", "atomic", "direct")))
    assert not copied.allows("atomic")
    assert TopicSettings(discard="new", max_messages=1).allows("atomic")


def test_rollups_are_on_only_where_something_needs_them() -> None:
    for without in (TopicSettings(), TopicSettings(history=1), TopicSettings(mirror="a")):
        assert not any(map(without.allows, ("rollup", "schedules")))
    for needed in (
        TopicSettings(rollup=True),
        TopicSettings(schedules=True),
        TopicSettings(marker_ttl=60, history=1),
    ):
        assert needed.allows("rollup")
    assert TopicSettings(schedules=True).allows("schedules")
    with pytest.raises(ConfigError, match="marker_ttl: needs message_ttl and rollup"):
        TopicSettings(marker_ttl=60, history=1, rollup=False)


def test_a_topic_of_an_earlier_version_keeps_its_rollups_until_they_are_switched_off() -> None:
    """Such a stream allows roll-ups, and schedules wherever the server could."""
    (table,) = to_stream_configs("t", TopicSettings(history=1, rollup=True))
    found = from_stream_config(table)
    assert found.rollup is True
    assert differences(TopicSettings(history=1), found) == []
    assert not found.changed({"rollup": False}).allows("rollup")
    (topic,) = to_stream_configs("t", TopicSettings(schedules=True))
    found = from_stream_config(topic)
    assert (found.rollup, found.schedules) == (None, True)
    assert differences(TopicSettings(), found) == []
    with pytest.raises(ConfigError, match="promote the mirror"):
        found.changed({"rollup": False})


def test_copies_and_topics_with_a_history_take_no_packs() -> None:
    assert TopicSettings().takes_packs
    assert not TopicSettings(history=1).takes_packs
    assert not TopicSettings(mirror="a").takes_packs
    assert not TopicSettings(packs=False).takes_packs


def test_a_stream_says_that_it_never_takes_packs() -> None:
    without: list[dict[str, Any]] = [{"packs": False}, {"history": 1}]
    with_packs: list[dict[str, Any]] = [{}, {"packs": True}, {"mirror": "a"}]
    for given in without:
        (config,) = to_stream_configs("t", TopicSettings(**given))
        assert config["metadata"]["millstream.packs"] == "0"
        config["max_msgs_per_subject"] = -1  # whatever becomes of the history
        assert not from_stream_config(config).takes_packs
    for given in with_packs:
        (config,) = to_stream_configs("t", TopicSettings(**given))
        assert "millstream.packs" not in config["metadata"]
    for given in [*without, *with_packs, {"sources": ["a", "b"]}, {"history": 5}]:
        (config,) = to_stream_configs("t", TopicSettings(**given))
        settings = from_stream_config(config)
        assert may_hold_packs(config) == (settings.takes_packs or settings.is_copy)
        assert may_hold_packs(config) == (given not in without and "history" not in given)


def test_conditional_writes_need_a_topic_without_packs() -> None:
    expecting = PublishOptions(expected_last=0)
    for settings in (TopicSettings(packs=False), TopicSettings(history=1)):
        settings.check_options(expecting)
    with pytest.raises(ConfigError, match="takes packs"):
        TopicSettings().check_options(expecting)


def test_the_duplicate_window_never_exceeds_the_age_and_is_off_for_copies() -> None:
    assert TopicSettings().window == timedelta(minutes=2)
    assert TopicSettings(max_age="30s").window == timedelta(seconds=30)
    assert TopicSettings(sources=["a"]).window is None
    assert TopicSettings(sources=["a"], duplicate_window="1m").window == timedelta(minutes=1)


def test_a_ttl_that_would_not_be_honored_is_refused() -> None:
    settings = TopicSettings(max_age="1h")
    assert settings.ttl_text("90s") == "90s"
    assert settings.ttl_text(1.2) == "2s"  # the server counts whole seconds
    with pytest.raises(ConfigError, match="longer than the topic's max_age, 1h"):
        settings.ttl_text("2h")
    with pytest.raises(ConfigError, match="below the minimum of one second"):
        settings.ttl_text(0.5)
    with pytest.raises(ConfigError, match="set message_ttl"):
        TopicSettings(message_ttl=False).ttl_text(5)


# -- streams ------------------------------------------------------------------------------


def test_one_partition_is_one_stream_and_several_are_numbered() -> None:
    (alone,) = to_stream_configs("orders", TopicSettings())
    assert (alone["name"], alone["subjects"]) == ("orders", ["orders.>"])
    three = to_stream_configs("orders", TopicSettings(partitions=3, prefix="shop.orders"))
    assert [config["name"] for config in three] == ["orders-0", "orders-1", "orders-2"]
    assert three[2]["subjects"] == ["shop.orders.2.>"]
    identity = identity_of(three[2])
    assert (identity.topic, identity.partition, identity.partitions) == ("orders", 2, 3)
    assert identity.prefix == "shop.orders.2"


FULL = TopicSettings(
    partitions=2,
    retention="interest",
    max_age="7d",
    max_bytes="10GiB",
    max_messages=1000,
    history=1,
    max_message_size="1MiB",
    replicas=3,
    duplicate_window="1h",
    marker_ttl="1m",
    compression="s2",
    deny_delete=True,
    prefix="shop",
    max_subscriptions=50,
    atomic=False,
    description="all of it",
    wire_format="avro",
    guarded=True,
    metadata={"team": "shop", "millstream.schema": "7"},
)


@pytest.mark.parametrize(
    "settings",
    [
        TopicSettings(),
        FULL,
        TopicSettings(discard="new", discard_new_per_key=True, history=5, deny_purge=True),
        TopicSettings(storage="memory", message_ttl=False, direct=False, atomic=False),
        TopicSettings(early_ack=True),
        TopicSettings(mirror=Origin("o", domain="edge", start=7, filter="k", partitions=1)),
        TopicSettings(mirror=Origin("o", partitions=3, prefix="shop.o"), partitions=3),
        TopicSettings(
            sources=[
                Origin("a", partitions=4, filter="eu.*.x"),
                Origin("b", start=datetime(2026, 1, 1, tzinfo=UTC), partitions=1),
                Origin("S", foreign=True, filter="ev.>", partitions=1),
            ]
        ),
    ],
)
def test_settings_are_read_back_from_every_partition(settings: TopicSettings) -> None:
    for config in to_stream_configs("orders", settings):
        assert from_stream_config(config) == settings


def test_a_mirror_keeps_the_subjects_of_its_origin() -> None:
    """Otherwise the server would let it answer reads of the origin with other subjects."""
    settings = TopicSettings(mirror=Origin("orders", domain="edge", partitions=2), partitions=2)
    config = to_stream_configs("copy", settings)[1]
    assert config["mirror"] == {"name": "orders-1", "external": {"api": "$JS.edge.API"}}
    assert "subjects" not in config
    assert identity_of(config).prefix == "orders.1"


def test_sources_are_mapped_to_own_subjects_partition_by_partition() -> None:
    settings = TopicSettings(sources=[Origin("eu", partitions=2)], partitions=2)
    config = to_stream_configs("all", settings)[1]
    moved = [{"src": "eu.1.>", "dest": "all.1.>"}]
    assert config["sources"] == [{"name": "eu-1", "subject_transforms": moved}]


def test_one_partition_collects_all_of_an_origin() -> None:
    settings = TopicSettings(sources=[Origin("eu", partitions=2, filter="*.x")])
    (config,) = to_stream_configs("all", settings)
    moves = [source["subject_transforms"][0] for source in config["sources"]]
    assert moves == [
        {"src": "eu.0.*.x", "dest": "all.{{wildcard(1)}}.x"},
        {"src": "eu.1.*.x", "dest": "all.{{wildcard(1)}}.x"},
    ]


def test_a_topic_cannot_copy_itself_but_one_of_the_same_name_beyond_a_leaf_node() -> None:
    with pytest.raises(ConfigError, match="copy of itself"):
        to_stream_configs("orders", TopicSettings(mirror="orders"))
    assert to_stream_configs("orders", TopicSettings(mirror=Origin("orders", domain="edge")))


def test_a_foreign_stream_with_any_settings_is_described() -> None:
    config = {
        "name": "KV_x",
        "subjects": ["$KV.x.>"],
        "discard": "new",
        "max_msgs_per_subject": 5,
        "subject_delete_marker_ttl": 1_000_000_000,
        "deny_purge": False,
        "mirror": None,
    }
    settings = from_stream_config(config)
    assert (settings.discard, settings.history) == (Discard.NEW, 5)
    assert settings.storage is Storage.FILE
    assert not identity_of(config).managed
    assert identity_of(config).prefix is None
    # Its own oddities do not stand in the way of a change.
    assert settings.changed({"max_age": "1h"}).max_age == timedelta(hours=1)
    with pytest.raises(ConfigError, match="unknown setting 'colour'"):
        settings.changed({"colour": "red"})


def test_origins_that_another_client_changed_are_shown_as_they_are() -> None:
    (config,) = to_stream_configs("all", TopicSettings(sources=[Origin("a", partitions=1)]))
    config["sources"] = [{"name": "b", "external": {"api": "$JS.edge.API", "deliver": ""}}]
    expected = Origin("b", domain="edge", partitions=1, foreign=True)
    assert from_stream_config(config).sources == (expected,)


def test_metadata_that_does_not_fit_the_stream_is_ignored() -> None:
    (config,) = to_stream_configs("orders", TopicSettings())
    assert not identity_of({**config, "name": "restored"}).managed


def test_an_origin_is_completed_from_its_stream() -> None:
    (config, _) = to_stream_configs("orders", TopicSettings(partitions=2, prefix="shop"))
    assert resolved(Origin("orders"), config) == Origin("orders", partitions=2, prefix="shop")
    # A single partition, named by its stream, is copied like any other stream.
    assert resolved(Origin("orders-0"), config).foreign


def test_a_change_keeps_what_millstream_does_not_know() -> None:
    before = to_stream_configs("orders", TopicSettings(metadata={"a": "1", "b": "2"}))[0]
    after = to_stream_configs("orders", TopicSettings(max_age="1h", metadata={"a": "3"}))[0]
    server = {
        **before,
        "placement": {"tags": ["ssd"]},
        "metadata": {**before["metadata"], "z": "9"},
    }
    result = changed_config(server, before, after)
    assert result["placement"] == {"tags": ["ssd"]}
    assert result["max_age"] == 3_600_000_000_000
    assert {key: result["metadata"].get(key) for key in "abz"} == {"a": "3", "b": None, "z": "9"}


# -- differences --------------------------------------------------------------------------


def test_equal_settings_in_different_forms_have_no_differences() -> None:
    assert differences(TopicSettings(max_age="60s"), TopicSettings(max_age="1m")) == []
    explicit = TopicSettings(duplicate_window="2m", schedules=False, atomic=True)
    assert differences(TopicSettings(), explicit) == []
    looked_up = TopicSettings(mirror=Origin("a", partitions=1))
    assert differences(TopicSettings(mirror="a"), looked_up) == []


@pytest.mark.parametrize(
    ("wanted", "found", "setting", "changeable"),
    [
        ({"max_age": "7d"}, {"max_age": "1d"}, "max_age", True),
        ({"partitions": 3}, {}, "partitions", False),
        ({"storage": "memory"}, {}, "storage", False),
        ({"retention": "interest"}, {}, "retention", True),
        ({"retention": "workqueue"}, {}, "retention", False),
        ({"deny_delete": True}, {}, "deny_delete", True),
        ({}, {"deny_delete": True}, "deny_delete", False),
        ({"schedules": False, "rollup": True}, {"schedules": True}, "schedules", False),
        ({"schedules": True, "rollup": True}, {"rollup": True}, "schedules", True),
        ({"rollup": False}, {"rollup": True}, "rollup", True),
        ({"prefix": "x"}, {}, "prefix", False),
        ({"sources": ["b"]}, {"sources": ["a"]}, "sources", True),
        ({"mirror": "b"}, {"mirror": "a"}, "mirror", False),
        ({"early_ack": True, "atomic": True}, {}, "early_ack", False),
    ],
)
def test_a_difference_says_whether_it_can_be_changed(
    wanted: dict[str, Any], found: dict[str, Any], setting: str, changeable: bool
) -> None:
    ours, theirs = TopicSettings.unchecked(wanted), TopicSettings.unchecked(found)
    (only,) = differences(ours, theirs)
    assert (only.setting, only.changeable) == (setting, changeable)


def test_a_conflict_names_setting_wanted_found_and_what_to_do() -> None:
    found = TopicSettings(max_age="1d")
    error = conflict(
        "orders", differences(TopicSettings(max_age="7d", storage="memory"), found), "exists"
    )
    text = str(error)
    assert "max_age is 1d, wanted 7d (edit_topic(..., max_age=...))" in text
    assert "storage is file, wanted memory (cannot be changed: stored events do not move" in text
    assert [difference.setting for difference in error.differences] == ["max_age", "storage"]
    assert "the broker refused" not in text
