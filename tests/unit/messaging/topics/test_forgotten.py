"""What a table's settings and notes say about values that are not stored."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from millstream.messaging.topics.forgotten import begun, doubt, history_of, loses_values
from millstream.wire.api import StreamInfo, StreamState

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
NANOSECONDS = 1_000_000_000


def info(config: dict[str, Any], first: int = 5, messages: int = 3) -> StreamInfo:
    """A table of yesterday that has removed some values, as it is now."""
    state = StreamState(messages=messages, first_seq=first, last_seq=9)
    created, now = (NOW - timedelta(days=1)).isoformat(), NOW.isoformat()
    return StreamInfo({"max_msgs_per_subject": 3, **config}, state, created, ts=now)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, None),
        ({"max_age": 3600 * NANOSECONDS}, "max_age"),
        ({"max_age": 48 * 3600 * NANOSECONDS}, None),  # the table is younger
        ({"max_bytes": 100}, "max_bytes"),
        ({"max_bytes": -1, "max_msgs": -1}, None),
        ({"max_msgs": 100}, "max_messages"),
        ({"max_msgs": 100, "discard": "new"}, None),
        ({"retention": "interest"}, "interest"),
        ({"allow_rollup_hdrs": True}, "rollup"),
        ({"mirror": {"name": "x"}}, "is a copy"),
        ({"sources": [{"name": "x"}]}, "is a copy"),
    ],
    ids=str,
)
def test_settings_that_remove_values_put_the_past_in_doubt(
    config: dict[str, Any], why: str | None
) -> None:
    found = doubt(info(config), NOW)
    assert found is None if why is None else why in (found or "")
    assert doubt(info(config, first=1, messages=9), NOW) is None  # nothing was removed


def test_what_removes_the_oldest_first_has_removed_nothing_while_the_first_is_there() -> None:
    config = {"max_age": 3600 * NANOSECONDS, "max_bytes": 100}
    assert doubt(info(config, first=1), NOW) is None
    assert doubt(info(config, first=2), NOW) is not None


def test_a_note_puts_what_was_before_it_in_doubt() -> None:
    noted = info(begun({}, NOW.isoformat()))
    assert doubt(noted, NOW - timedelta(seconds=1)) is not None
    assert doubt(noted, NOW) is not None
    assert doubt(noted, NOW + timedelta(microseconds=1)) is None
    # Whoever removed values did not come to its end.
    for unfinished in (begun({}), begun({}, "garbage"), begun({}, "")):
        assert doubt(info(unfinished), NOW + timedelta(days=9)) is not None


def test_a_change_is_noted_if_it_is_one_of_a_table_and_about_its_values() -> None:
    table: dict[str, Any] = {"max_msgs_per_subject": 3, "max_age": 0}
    assert loses_values(table, {**table, "max_msgs_per_subject": 4})
    assert loses_values(table, {**table, "max_age": 5})
    assert not loses_values(table, {**table, "description": "x"})
    assert not loses_values(table, {"max_msgs_per_subject": 3})  # 0 is what is not given
    topic: dict[str, Any] = {"max_msgs_per_subject": -1}
    assert not loses_values(topic, {**topic, "max_age": 5})
    assert loses_values(topic, table)


def test_a_key_that_refuses_more_values_is_never_overwritten() -> None:
    assert history_of(info({})) == 3
    assert history_of(info({"discard_new_per_subject": True})) is None
    assert history_of(info({"max_msgs_per_subject": -1})) is None
