"""When a schedule is due, in the words of the server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from millstream.errors import ConfigError
from millstream.events.classify import Kind, kind_of
from millstream.events.schedule import due_at, named_subject, read_rule, with_headers

NOON = datetime(2027, 1, 2, 12, tzinfo=timezone(timedelta(hours=1)))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"every": "1h"}, "@every 1h"),
        ({"every": 1}, "@every 1s"),
        ({"every": timedelta(days=1, seconds=90)}, "@every 24h1m30s"),
        ({"cron": "0 3 * * *"}, "0 0 3 * * *"),
        ({"cron": " */5  * * * * 1-5 "}, "*/5 * * * * 1-5"),
        ({"cron": "@daily"}, "@daily"),
        ({"at": NOON}, "@at 2027-01-02T11:00:00Z"),
    ],
)
def test_a_rule_is_written_as_the_server_reads_it(given: dict[str, Any], text: str) -> None:
    ways: dict[str, Any] = {"every": None, "cron": None, "at": None, "time_zone": None}
    assert read_rule(**{**ways, **given}).text == text


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({}, "one of every, cron and at"),
        ({"every": "1h", "cron": "0 3 * * *"}, "one of every, cron and at"),
        ({"every": "500ms"}, "whole seconds"),
        ({"every": 1.5}, "whole seconds"),
        ({"every": "soon"}, "every"),
        ({"cron": "0 3 * *"}, "minute hour day month weekday"),
        ({"cron": "@every 1s"}, "minute hour day month weekday"),
        ({"at": datetime(2027, 1, 2)}, "time zone"),  # noqa: DTZ001
        ({"every": "1h", "time_zone": "Europe/Berlin"}, "only a cron rule"),
    ],
)
def test_what_is_no_rule_is_refused(given: dict[str, Any], word: str) -> None:
    ways: dict[str, Any] = {"every": None, "cron": None, "at": None, "time_zone": None}
    with pytest.raises(ConfigError, match=word):
        read_rule(**{**ways, **given})


def test_the_next_time_is_read_from_the_rule_or_from_the_last_event() -> None:
    assert due_at("@at 2027-01-02T11:00:00Z", None) == NOON.astimezone(UTC)
    assert due_at("@every 1h", "2027-01-02T12:00:00+01:00") == NOON
    assert due_at("@every 1h", None) is due_at("@every 1h", "purge") is None


def test_the_record_of_a_schedule_is_no_event() -> None:
    for prefix in ("orders", "orders.3"):
        subject = named_subject(prefix, "nightly").encode()
        assert kind_of(subject, b"", len(prefix) + 1) is Kind.OWN


def test_headers_are_added_to_a_block() -> None:
    block = with_headers(b"NATS/1.0\r\na: 1\r\n\r\n", [("b", "2")])
    assert block == b"NATS/1.0\r\na: 1\r\nb: 2\r\n\r\n"
