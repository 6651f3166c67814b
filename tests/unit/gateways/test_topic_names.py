"""Kafka's names of topics and Millstream's."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.events.subject import is_name
from millstream.gateways.kafka.topic_names import (
    BadName,
    is_own,
    kafka_name_of,
    recorded_name,
    topic_name_of,
)

KAFKA_NAMES = st.from_regex(re.compile(r"[a-zA-Z0-9._-]{1,249}", re.ASCII), fullmatch=True)


@pytest.mark.parametrize(
    ("name", "topic"),
    [
        ("orders", "orders"),
        ("a_b-C9", "a_b-C9"),
        ("orders.v1", "orders_v1"),
        ("a..b", "a__b"),
        ("...", "kafka___"),
        (".hidden", "kafka_hidden"),
        ("_schemas", "kafka_schemas"),
        ("__consumer_offsets", "kafka__consumer_offsets"),
        ("-x", "kafka-x"),
        ("x" * 200, "x" * 200),
    ],
)
def test_a_name_becomes_a_topic(name: str, topic: str) -> None:
    assert topic_name_of(name) == topic
    assert kafka_name_of(topic, recorded_name(name)) == name


def test_a_name_that_both_allow_is_not_recorded() -> None:
    assert recorded_name("orders") is None
    assert recorded_name("orders.v1") == "orders.v1"


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "ä", "x" * 250, "a\n"])
def test_what_kafka_does_not_allow_is_refused(name: str) -> None:
    with pytest.raises(BadName):
        topic_name_of(name)


@pytest.mark.parametrize("name", ["x" * 201, "_" + "x" * 195])
def test_a_name_that_is_too_long_for_a_topic_is_refused_with_the_limit(name: str) -> None:
    with pytest.raises(BadName, match="at most 200"):
        topic_name_of(name)


@pytest.mark.parametrize("name", ["mill-schemas", "mill-groups", "mill-anything"])
def test_topics_of_millstream_itself_have_no_name(name: str) -> None:
    assert is_own(name)
    with pytest.raises(BadName, match="Millstream's own"):
        topic_name_of(name)


@pytest.mark.parametrize("recorded", ["other.name", "..", "", "a b"])
def test_a_recorded_name_of_another_topic_does_not_count(recorded: str) -> None:
    assert kafka_name_of("orders_v1", recorded) == "orders_v1"


@given(KAFKA_NAMES)
def test_every_name_is_kept_or_refused(name: str) -> None:
    try:
        topic = topic_name_of(name)
    except BadName:
        return
    assert is_name(topic)
    assert kafka_name_of(topic, recorded_name(name)) == name
