"""`millstream pub` says what became of the messages."""

from __future__ import annotations

import logging

import pytest

import millstream
from millstream.broker import Role
from millstream.errors import PermissionDenied
from millstream.testing import running_broker
from tests.integration.cli.conftest import Cli
from tests.integration.cli.messaging_commands import Commands


def test_a_message_that_the_server_refuses_is_not_called_published(cli: Cli) -> None:
    with running_broker(auth=True) as broker:
        who = broker.credentials(Role.READER)
        cli.environment |= {
            "NATS_URL": broker.url,
            "NATS_USER": who.user,
            "NATS_PASSWORD": who.password.reveal(),
        }
        assert "may not publish" in cli.error("pub", "news", "x")
        assert "may not publish" in cli.error("pub", "news", "x", "--count", "3", "--sleep", "1ms")


@pytest.mark.parametrize(
    ("partitions", "subject", "words"),
    [
        ("1", "orders", "'orders' is a topic, but"),
        ("4", "orders", "'orders' is a topic, but"),
        ("4", "orders.x", "has 4 partitions"),
        ("4", "orders.4.x", "has 4 partitions"),
        ("1", "orders.x", None),
        ("4", "orders.3.x", None),
        ("1", "other.x", None),
        ("1", "other", None),
    ],
)
def test_a_message_to_a_topics_name_that_nothing_stores_is_reported(
    cli: Cli, millstream_url: str, partitions: str, subject: str, words: str | None
) -> None:
    cli.environment["NATS_URL"] = millstream_url
    Commands(millstream_url)("topic", "create", "orders", "--partitions", partitions)
    warning = cli("pub", subject, "x").stderr
    if words is None:
        assert warning == ""
    else:
        assert words in warning
        assert "pub -t orders" in warning


async def test_the_sdk_logs_one_warning_for_messages_to_a_topics_name(
    millstream_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with millstream.connect(millstream_url) as mill:
        await mill.create_topic("orders")
        await mill.create_topic("other", partitions=2)
        with caplog.at_level(logging.WARNING, "millstream.messaging"):
            for subject in ("orders.a", "news", "orders", "orders", "other.0.a", "other.a"):
                await mill.publish(subject, b"x")
                await mill._unstored.settled()
    assert [record.getMessage()[:30] for record in caplog.records] == [
        "'orders' is a topic, but a mes",
        "a message to 'other.a' is not ",
    ]


async def test_a_user_without_rights_publishes_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_broker(auth=True) as broker:
        who = broker.credentials(Role.READER)
        async with millstream.connect(broker.url, user=who.user, password=who.password) as mill:
            with caplog.at_level(logging.WARNING, "millstream.messaging"):
                await mill.publish("news", b"x")
                await mill._unstored.settled()
            with pytest.raises(PermissionDenied):
                await mill.request("news", b"x", timeout=30)
    assert caplog.records == []
