"""service ls and stats; the same calls of the SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import millstream.blocking
from millstream.blocking import Mill
from millstream.errors import ServiceError
from tests.integration.cli.conftest import until
from tests.integration.cli.messaging_commands import Commands

PATIENT = ("--wait", "1s", "--timeout", "60s")


@pytest.fixture
def mill(millstream_url: str) -> Iterator[Mill]:
    with millstream.blocking.connect(millstream_url) as mill:
        yield mill


def test_services_are_found_with_what_they_have_done(millstream_url: str, mill: Mill) -> None:
    run = Commands(millstream_url)
    assert run.json("service", "ls") == []
    assert "No service answered" in run("service", "ls")
    assert mill.service_stats() == []
    assert "service 'prices'" in run.error("service", "stats", "prices")
    prices = mill.service("prices", "1.2.0", description="What a sack costs")
    stock = mill.service("stock", "0.1.0")

    @prices.endpoint("prices.get")
    def price(message: millstream.blocking.Message) -> str:
        if message.text != "flour":
            raise ServiceError("prices.get", "404", "nobody sells it")
        return "12.50"

    with prices, stock:
        mill.request("prices.get", "flour")
        with pytest.raises(ServiceError):
            mill.request("prices.get", "gold")
        # An instance that is held up answers when nobody waits any more: asked again.
        until(lambda: len(run.json("service", "ls", *PATIENT)) == 2)
        (found,) = run.json("service", "ls", "prices", "--limit", "1")
        assert (found["name"], found["version"]) == ("prices", "1.2.0")
        assert found["endpoints"][0]["subject"] == "prices.get"
        text = run("service", "ls")
        assert "What a sack costs" in text
        (one,) = run.json("service", "stats", "prices", "--limit", "1")
        (endpoint,) = one["endpoints"]
        assert (endpoint["num_requests"], endpoint["num_errors"]) == (2, 1)
        assert endpoint["last_error"] == "404:nobody sells it"
        assert "404:nobody sells it" in run("service", "stats", "prices", "--limit", "1")


def test_the_answers_of_other_clients_are_read_and_wrong_ones_left_out(
    mill: Mill, caplog: pytest.LogCaptureFixture
) -> None:
    go = {"type": "io.nats.micro.v1.info_response", "name": "go", "id": "1", "version": "1.0.0"}
    answers = [json.dumps({**go, "metadata": None, "new": 1}).encode(), b"{}", b"hello"]

    def respond(message: millstream.blocking.Message) -> None:
        for answer in answers:
            message.respond(answer)

    with mill.subscribe("$SRV.INFO", handler=respond):
        (found,) = mill.services(limit=len(answers), quiet=30.0)
    assert (found.name, found.endpoints, found.metadata) == ("go", None, None)
    assert "something else" in caplog.text
