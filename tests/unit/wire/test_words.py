"""What the server refuses is worded as Millstream's users know it."""

from __future__ import annotations

import re

import pytest

from millstream.errors import LimitReached, PermissionDenied, SubscriptionNotFound
from millstream.settings import ConnectionSettings, Secret
from millstream.wire.api import Refusal, error_from
from millstream.wire.handshake import denied_subject, parse_address
from millstream.wire.words import WORDINGS, asked_for, asked_on


def refused(number: int, text: str, verb: str) -> str:
    return str(error_from(Refusal(400, number, text), verb))


def denied(subject: str, url: str = "nats://ann:pw@host") -> PermissionDenied:
    settings = ConnectionSettings(urls=(url,))
    text = f'Permissions Violation for Publish to "{subject}"'
    found = denied_subject(text, settings, parse_address(url))
    assert found is not None
    return found


def test_a_refusal_says_what_was_asked_what_was_found_and_what_to_do() -> None:
    error = error_from(Refusal(404, 10014, "consumer not found"), "CONSUMER.INFO.orders.s")
    assert str(error) == (
        "the broker refused to look at subscription 's' of topic 'orders': there is no such "
        "subscription (error 10014). Create it first, or check the name"
    )
    assert isinstance(error, SubscriptionNotFound)
    assert (error.code, error.err_code, error.description) == (404, 10014, "consumer not found")


@pytest.mark.parametrize(
    ("number", "verb", "words"),
    [
        (10084, "CONSUMER.CREATE.jobs.s", "is a work queue, whose subscriptions ack each event"),
        (
            10099,
            "CONSUMER.CREATE.jobs.s",
            "has a subscription already (error 10099)",
        ),
        (10100, "CONSUMER.CREATE.jobs.s.f.>", "refused to create or change subscription 's' of"),
        (10065, "STREAM.CREATE.orders", "to create topic 'orders': another topic or stream stores"),
        (10023, "STREAM.CREATE.orders", "storage limit is used up"),
        (10008, "STREAM.INFO.orders", "starting or electing a leader (error 10008). Try again"),
        (10026, "CONSUMER.CREATE.orders.s", "or raise max_subscriptions"),
    ],
)
def test_the_numbers_users_meet(number: int, verb: str, words: str) -> None:
    assert words in refused(number, "the server's words", verb)


def test_an_unknown_refusal_keeps_the_servers_words() -> None:
    assert refused(10157, "pedantic mode", "STREAM.UPDATE.orders") == (
        "the broker refused to change topic 'orders': pedantic mode (error 10157)"
    )
    assert refused(99999, "because", "") == "the broker refused: because (error 99999)"
    assert isinstance(error_from(Refusal(503, 10077, "maximum bytes exceeded")), LimitReached)


def test_no_wording_speaks_of_streams_and_consumers_alone() -> None:
    for found, advice in WORDINGS.values():
        text = f"{found} {advice}".replace("topic or stream", "").replace("max_streams", "")
        assert not re.search(r"\b(streams?|consumers?)\b", text), text
        assert not advice.endswith(".")


def test_a_denied_call_is_named_by_what_it_does() -> None:
    found = denied("$JS.API.STREAM.CREATE.orders")
    assert str(found) == (
        "user 'ann' may not create topic 'orders'. This needs the role app (not limited to certain "
        "topics) or admin: connect as such a user, or ask for it"
    )
    assert found.subject == "$JS.API.STREAM.CREATE.orders"
    assert (found.operation, found.action, found.user) == (
        "publish to",
        "create topic 'orders'",
        "ann",
    )


@pytest.mark.parametrize(
    ("subject", "action"),
    [
        ("$JS.hub.API.STREAM.DELETE.orders", "delete topic 'orders'"),
        ("$JS.API.STREAM.NAMES", "list the topics"),
        ("$JS.API.DIRECT.GET.orders.orders.ann", "read topic 'orders'"),
        ("$JS.API.CONSUMER.CREATE.orders", "create or change a subscription of topic 'orders'"),
        ("$JS.API.CONSUMER.MSG.NEXT.orders.s", "receive from subscription 's' of topic 'orders'"),
        ("$JS.ACK.orders.s.1.2.3.4.5", "settle events of subscription 's' of topic 'orders'"),
        ("$JS.ACK._.hash.orders.s.1.2.3.4.5.x", "settle events of subscription 's' of topic"),
    ],
)
def test_calls_in_our_words(subject: str, action: str) -> None:
    found = asked_on(subject)
    assert found is not None
    assert found.action.startswith(action)


def test_what_is_no_call_is_named_by_its_subject() -> None:
    assert asked_on("orders.ann") is None
    assert asked_for("NEWS.FROM.THE.FUTURE") is None
    assert str(denied("orders.ann")).startswith("user 'ann' may not publish to 'orders.ann'. ")


def test_a_token_is_never_shown_as_a_name() -> None:
    assert str(denied("a", "nats://secret-token@host")).startswith("this user may not publish")
    settings = ConnectionSettings(urls=("nats://host",), token=Secret("hush"), user="hush")
    found = denied_subject(
        'Permissions Violation for Publish to "a"', settings, parse_address("nats://host")
    )
    assert found is not None
    assert "hush" not in str(found)
