"""Ack addresses and errors of the JetStream API."""

from __future__ import annotations

import msgspec
import pytest

from millstream.errors import (
    ApiError,
    LimitReached,
    SubscriptionNotFound,
    TopicNotFound,
    WrongSequence,
)
from millstream.wire.api import (
    AckAddress,
    ConsumerConfig,
    ConsumerInfo,
    Refusal,
    api_prefix,
    error_from,
    parse_ack_address,
)
from millstream.wire.message import stored_ns_of

EXPECTED = AckAddress("orders", "billing", 2, 17, 5, 1_700_000_000_123_456_789, 40)


def test_an_ack_address_is_read_in_both_of_its_forms() -> None:
    tail = b"orders.billing.2.17.5.1700000000123456789.40"
    assert parse_ack_address(b"$JS.ACK." + tail) == EXPECTED
    assert parse_ack_address(b"$JS.ACK._.ACCHASH." + tail) == EXPECTED
    assert parse_ack_address(b"$JS.ACK.edge.ACCHASH." + tail) == EXPECTED
    assert parse_ack_address(b"$JS.ACK.edge.ACCHASH." + tail + b".random") == EXPECTED


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (10059, TopicNotFound),
        (10014, SubscriptionNotFound),
        (10071, WrongSequence),
        (10077, LimitReached),
        (99999, ApiError),
    ],
)
def test_a_refusal_becomes_the_most_specific_error_with_its_numbers(
    number: int, kind: type[ApiError]
) -> None:
    error = error_from(Refusal(400, number, "because"))
    assert type(error) is kind
    assert (error.code, error.err_code, error.description) == (400, number, "because")
    assert f"(error {number})" in str(error)


def test_a_domain_is_part_of_the_prefix() -> None:
    assert (api_prefix(None), api_prefix("edge")) == ("$JS.API", "$JS.edge.API")


def test_only_settings_that_differ_from_the_server_s_are_sent() -> None:
    assert msgspec.json.encode(ConsumerConfig(name="a")) == b'{"name":"a"}'


def test_fields_of_a_newer_server_are_ignored() -> None:
    info = msgspec.json.decode(
        b'{"name":"a","new":1,"config":{"durable_name":"a","newer":{}}}', type=ConsumerInfo
    )
    assert (info.name, info.config.durable_name) == ("a", "a")


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("2026-11-15T23:13:38.248427975Z", 1_794_784_418_248_427_975),
        ("2026-11-15T23:13:38Z", 1_794_784_418_000_000_000),
        ("2026-11-15T23:13:38.5Z", 1_794_784_418_500_000_000),
        ("2026-11-16T00:13:38.000000001+01:00", 1_794_784_418_000_000_001),
    ],
)
def test_times_of_the_server_keep_their_nanoseconds(text: str, nanoseconds: int) -> None:
    assert stored_ns_of(text) == nanoseconds
