"""Kafka's settings of topics as topic settings, and back."""

from __future__ import annotations

from datetime import timedelta

import pytest

from millstream.gateways.kafka.topic_configs import (
    CONFIGS,
    DEFAULT_MESSAGE_BYTES,
    DEFAULT_RETENTION_MS,
    BadConfig,
    ConfigSource,
    broker_entries,
    changes_for,
    entries_of,
    max_message_bytes,
    new_settings,
    reset_by,
    timestamp_bounds,
)
from millstream.messaging import TopicSettings
from millstream.messaging.topics.choices import Compression

LARGEST = 16 * 1024 * 1024
MADE = new_settings(TopicSettings(), {}, LARGEST)


def changed(settings: TopicSettings, **given: str | None) -> TopicSettings:
    """The settings after a client set some of Kafka's (dots are underscores), None: by default."""
    names = {name.replace("_", "."): value for name, value in given.items()}
    known = {name: value for name, value in names.items() if value is not None}
    reset = [name for name in names if name not in known]
    return settings.changed(changes_for(settings, known, reset, LARGEST))


def shown(settings: TopicSettings, *names: str) -> dict[str, str]:
    return {one.name: one.value for one in entries_of(settings) if one.name in names}


def value(settings: TopicSettings, name: str) -> str:
    return shown(settings, name)[name]


def test_a_new_topic_has_the_defaults_of_kafka() -> None:
    assert MADE.max_age == timedelta(days=7)
    assert MADE.kafka_configs is None
    entries = entries_of(MADE)
    assert [one.name for one in entries] == sorted(CONFIGS)
    assert {one.source for one in entries} == {ConfigSource.DEFAULT}
    assert all(one.value == CONFIGS[one.name].default for one in entries)


def test_a_topic_of_the_sdk_has_no_limit_of_age() -> None:
    assert shown(TopicSettings(), "retention.ms", "retention.bytes") == {
        "retention.ms": "-1",
        "retention.bytes": "-1",
    }


def test_limits_are_those_of_the_topic() -> None:
    settings = changed(MADE, retention_ms="86400000", retention_bytes="1000000")
    assert settings.max_age == timedelta(days=1)
    assert settings.max_bytes == 1_000_000
    assert settings.kafka_configs is None
    assert shown(settings, "retention.ms", "retention.bytes") == {
        "retention.ms": "86400000",
        "retention.bytes": "1000000",
    }
    settings = changed(settings, retention_ms="-1", retention_bytes="-1")
    assert (settings.max_age, settings.max_bytes) == (None, None)
    settings = changed(settings, retention_ms=None)
    assert settings.max_age == timedelta(milliseconds=DEFAULT_RETENTION_MS)


@pytest.mark.parametrize(
    ("given", "described"),
    [("0", "100"), ("1", "100"), ("100", "100"), (str(2**63 - 1), "-1"), (" 5000 ", "5000")],
)
def test_ages_that_the_broker_does_not_have_become_the_nearest(given: str, described: str) -> None:
    assert value(changed(MADE, retention_ms=given), "retention.ms") == described


def test_what_only_the_gateway_knows_is_kept_in_the_topic() -> None:
    settings = changed(MADE, max_message_bytes="500000", segment_ms="3600000")
    assert settings.kafka_configs == "max.message.bytes=500000,segment.ms=3600000"
    assert max_message_bytes(settings) == 500_000
    assert shown(settings, "max.message.bytes", "segment.ms") == {
        "max.message.bytes": "500000",
        "segment.ms": "3600000",
    }
    settings = changed(settings, segment_ms=None)
    assert settings.kafka_configs == "max.message.bytes=500000"
    settings = changed(settings, max_message_bytes=str(DEFAULT_MESSAGE_BYTES))
    assert settings.kafka_configs is None


def test_a_batch_is_not_larger_than_a_message_may_be() -> None:
    settings = MADE.changed({"max_message_size": "100kB"})
    assert max_message_bytes(settings) == settings.max_message_size
    with pytest.raises(BadConfig, match=r"max\.message\.bytes"):
        changed(settings, max_message_bytes="200000")
    with pytest.raises(BadConfig, match="largest batch"):
        changed(MADE, max_message_bytes=str(LARGEST + 1))


def test_bounds_of_times_are_kept() -> None:
    assert timestamp_bounds(MADE) == (2**63 - 1, 3_600_000)
    settings = changed(
        MADE, message_timestamp_after_max_ms="5", message_timestamp_before_max_ms="7"
    )
    assert timestamp_bounds(settings) == (7, 5)


def test_a_codec_compresses_the_files() -> None:
    settings = changed(MADE, compression_type="zstd")
    assert settings.compression is Compression.S2
    assert value(settings, "compression.type") == "zstd"
    settings = changed(settings, compression_type="producer")
    assert settings.compression is Compression.NONE
    assert settings.kafka_configs is None
    # Compressed without a client of Kafka: they get what producers sent.
    assert value(MADE.changed({"compression": "s2"}), "compression.type") == "producer"


def test_only_a_majority_can_be_asked_for() -> None:
    three = MADE.changed({"replicas": 3})
    assert value(changed(three, min_insync_replicas="2"), "min.insync.replicas") == "2"
    with pytest.raises(BadConfig, match="majority of the 3"):
        changed(three, min_insync_replicas="3")
    with pytest.raises(BadConfig, match="majority of the 1"):
        changed(MADE, min_insync_replicas="2")


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("no.such.thing", "1", "Unknown topic config name: no.such.thing"),
        ("retention.ms", "soon", "Invalid value soon for configuration retention.ms: Not a number"),
        ("retention.ms", "-2", "it must be -1 to"),
        ("retention.ms", "²", "Not a number"),
        ("retention.ms", "9" * 19, "it must be"),
        ("retention.bytes", "0", "would keep nothing"),
        ("max.message.bytes", str(2**31), "it must be 0 to"),
        ("cleanup.policy", "compact", "in this version"),
        ("cleanup.policy", "delete,compact", "in this version"),
        ("cleanup.policy", "keep", "the policies are"),
        ("cleanup.policy", "", "the policies are"),
        ("compression.type", "brotli", "one of producer"),
        ("message.timestamp.type", "LogAppendTime", "only 'CreateTime' is possible"),
        ("flush.messages", "1", "durability"),
        ("unclean.leader.election.enable", "true", "never made the leader"),
        ("remote.storage.enable", "maybe", "expected 'true' or 'false'"),
        ("preallocate", "2", "expected 'true' or 'false'"),
        ("min.cleanable.dirty.ratio", "2", "it must be 0 to 1"),
        ("min.cleanable.dirty.ratio", "nan", "it must be 0 to 1"),
        ("segment.bytes", "1", "it must be 14"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name: str, given: str, words: str) -> None:
    with pytest.raises(BadConfig) as caught:
        changes_for(MADE, {name: given}, (), LARGEST)
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_what_is_as_it_has_to_be_is_accepted() -> None:
    fixed = {name: config.default for name, config in CONFIGS.items()}
    assert changes_for(MADE, fixed, (), LARGEST) == {}
    assert changes_for(MADE, {"cleanup.policy": " delete "}, (), LARGEST) == {}
    assert changes_for(MADE, {}, list(CONFIGS), LARGEST) == {}
    assert new_settings(TopicSettings(), {"retention.ms": None}, LARGEST) == MADE


def test_one_bad_setting_changes_nothing() -> None:
    with pytest.raises(BadConfig):
        changes_for(MADE, {"retention.ms": "1000", "flush.ms": "5"}, (), LARGEST)


def test_a_table_stays_one() -> None:
    table = TopicSettings(history=1)
    assert value(table, "cleanup.policy") == "compact"
    assert value(table.changed({"max_age": "1d"}), "cleanup.policy") == "compact,delete"
    with pytest.raises(BadConfig, match="a table keeps"):
        changed(table, cleanup_policy="delete")
    replaced = changes_for(table, {"segment.ms": "5"}, reset_by({"segment.ms"}), LARGEST)
    assert table.changed(replaced).kafka_configs == "segment.ms=5"


def test_replacing_all_resets_the_others() -> None:
    settings = changed(MADE, retention_bytes="5000", segment_ms="7", retention_ms="1000")
    given = {"retention.ms": "2000"}
    settings = settings.changed(changes_for(settings, given, reset_by(given), LARGEST))
    assert settings == MADE.changed({"max_age": timedelta(seconds=2)})


@pytest.mark.parametrize(
    "kept", ["", "=", "a", "max.message.bytes", "max.message.bytes=x", "flush.ms=5", "x=1,,=2"]
)
def test_what_others_wrote_into_the_metadata_does_not_count(kept: str) -> None:
    settings = MADE.changed({"kafka_configs": kept})
    assert entries_of(settings) == entries_of(MADE)
    assert changed(settings, segment_ms="5").kafka_configs == "segment.ms=5"


def test_a_change_that_the_topic_refuses_is_a_bad_setting() -> None:
    base = TopicSettings(storage="memory")
    with pytest.raises(BadConfig, match="storage"):
        new_settings(base, {"compression.type": "lz4"}, LARGEST)


def test_the_broker_has_settings_that_tools_ask_for() -> None:
    found = {one.name: one for one in broker_entries(7, 3, auto_create=True)}
    assert found["broker.id"].value == "7"
    assert found["num.partitions"].value == "3"
    assert found["auto.create.topics.enable"].value == "true"
    assert found["delete.topic.enable"].value == "true"
    assert found["default.replication.factor"].value == "1"
    assert all(one.read_only for one in found.values())
