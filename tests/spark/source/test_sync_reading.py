"""The blocking client of the workers: publishing and reading that outlast a broker's restart."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from millstream.broker import Broker
from millstream.deadline import Deadline
from millstream.errors import ConnectFailed, TopicNotFound, WrongSequence
from millstream.settings import ConnectionSettings
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers
from millstream.wire.sync.connection import BlockingConnection, BlockingJetStream
from millstream.wire.sync.publish import publish_one, publish_pipelined
from millstream.wire.sync.range import read_range
from millstream.wire.sync.streams import (
    find_streams,
    get_message,
    get_messages,
    list_streams,
    sequence_at,
    stream_info,
)
from millstream.wire.sync.window import Window
from tests.spark.conftest import Account

PATIENCE = 120  # seconds; nothing here waits for so long


def message(number: int, **headers: str) -> OutgoingMessage:
    block = encode_headers({"Nats-Msg-Id": str(number), **headers})
    return OutgoingMessage(b"orders._", block, b"%d" % number)


@pytest.mark.parametrize("greeting", [b"", b'INFO {"server_id": "X", "max_payload": 1024}\r\n'])
def test_a_stalled_server_is_not_taken_for_a_connection(greeting: bytes) -> None:
    """The greeting says how to log in: what is sent before it could be rejected for good."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"nats://127.0.0.1:{server.getsockname()[1]}"
        links: list[socket.socket] = []
        answering = Thread(target=lambda: links.append(_greet(server, greeting)))
        answering.start()
        with pytest.raises(ConnectFailed):
            BlockingConnection(ConnectionSettings(urls=(url,))).open(Deadline(0.5))
        answering.join(PATIENCE)
        links.pop().close()


def _greet(server: socket.socket, greeting: bytes) -> socket.socket:
    link, _ = server.accept()
    link.sendall(greeting)
    return link


def test_pipelined_messages_are_stored_once_and_in_order_across_a_restart(
    millstream_broker: Broker,
) -> None:
    account = Account(millstream_broker.url)
    account.topic("orders")
    settings = ConnectionSettings(urls=(millstream_broker.url,))
    restarting = Thread(target=millstream_broker.restart)

    def messages() -> Iterator[OutgoingMessage]:
        for number in range(2000):
            if number == 700:
                restarting.start()
            yield message(number)

    with BlockingConnection(settings) as connection:
        acks = list(publish_pipelined(connection, messages(), PATIENCE))
    restarting.join()
    assert len(acks) == 2000
    assert sorted(int(value) for value in account.values("orders")) == list(range(2000))


def test_a_range_is_read_completely_across_a_restart(millstream_broker: Broker) -> None:
    account = Account(millstream_broker.url)
    account.topic("orders")
    account.publish("orders", [b"%d" % n for n in range(3000)])
    settings = ConnectionSettings(urls=(millstream_broker.url,))
    found: list[bytes] = []
    with BlockingConnection(settings) as connection:
        for messages in read_range(connection, "orders", 1, 3001, (), Window(messages=500)):
            found += [one.payload for one in messages]
            if len(found) == 1000:
                millstream_broker.restart()
    assert found == [b"%d" % n for n in range(3000)]


def test_readers_remove_their_consumers_and_subscriptions(account: Account) -> None:
    account.topic("orders")
    account.publish("orders", [b"x"] * 10)
    with BlockingConnection(ConnectionSettings(urls=(account.url,))) as connection:
        for _ in range(5):
            list(read_range(connection, "orders", 1, 11))
            stopped = iter(read_range(connection, "orders", 1, 11, (), Window(messages=2)))
            next(stopped)
            del stopped
        assert not connection._handlers
        jetstream = BlockingJetStream(connection)
        limit = Deadline(PATIENCE)  # consumers are removed without waiting for an answer
        while stream_info(jetstream, "orders").state.consumer_count and not limit.passed:
            continue
        assert stream_info(jetstream, "orders").state.consumer_count == 0


def test_single_messages_and_streams_can_be_queried(account: Account) -> None:
    account.topic("orders")
    account.publish("orders", [b"1", b"2"])
    with BlockingConnection(ConnectionSettings(urls=(account.url,))) as connection:
        jetstream = BlockingJetStream(connection)
        last = get_message(jetstream, "orders", {"last_by_subj": "orders.>"})
        assert last is not None
        assert (last.sequence, last.payload) == (2, b"2")
        assert get_message(jetstream, "orders", {"seq": 9}) is None
        assert sequence_at(jetstream, "orders", "2001-01-01T00:00:00Z") == 1
        assert sequence_at(jetstream, "orders", "2200-01-01T00:00:00Z") is None
        assert [info.config["name"] for info in list_streams(jetstream)] == ["orders"]
        with pytest.raises(TopicNotFound):
            stream_info(jetstream, "none")


def test_many_streams_are_found_in_two_round_trips(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.topic("orders", partitions=4)
    names = [f"orders-{number}" for number in range(20)]
    with BlockingConnection(ConnectionSettings(urls=(account.url,))) as connection:
        sent: list[int] = []
        send = BlockingConnection.send

        def counted(self: BlockingConnection, data: Any) -> None:
            sent.append(bytes(data).count(b"PUB "))
            send(self, data)

        monkeypatch.setattr(BlockingConnection, "send", counted)
        found = find_streams(BlockingJetStream(connection), names, PATIENCE)
        assert [info and info.config["name"] for info in found] == names[:4] + [None] * 16
        assert [count for count in sent if count] == [16, 4]
        assert not connection._handlers


def test_one_refusal_among_several_answers_is_raised(account: Account) -> None:
    account.topic("orders")
    account.publish("orders", [b"1"])
    with BlockingConnection(ConnectionSettings(urls=(account.url,))) as connection:
        jetstream = BlockingJetStream(connection)
        questions: list[tuple[str, object]] = [
            ("STREAM.INFO.orders", None),
            ("STREAM.INFO.none", None),
        ]
        info, refusal = jetstream.ask_all(questions, PATIENCE)
        assert isinstance(info, bytes)
        assert isinstance(refusal, TopicNotFound)
        found = get_messages(jetstream, "orders", [{"seq": 1}, {"seq": 2}], PATIENCE)
        assert [message and message.payload for message in found] == [b"1", None]
        with pytest.raises(TopicNotFound):
            get_messages(jetstream, "none", [{"seq": 1}], PATIENCE)


def test_a_refusal_is_raised_and_the_connection_stays_usable(account: Account) -> None:
    account.topic("orders")
    with BlockingConnection(ConnectionSettings(urls=(account.url,))) as connection:
        wrong: dict[str, Any] = {"Nats-Expected-Last-Subject-Sequence": "7"}
        with pytest.raises(WrongSequence):
            publish_one(connection, message(1, **wrong), PATIENCE)
        with pytest.raises(WrongSequence):
            list(publish_pipelined(connection, [message(2), message(3, **wrong)], PATIENCE))
        assert publish_one(connection, message(4), PATIENCE).seq >= 1
