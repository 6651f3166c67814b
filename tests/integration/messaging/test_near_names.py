"""A name that does not exist is answered with near ones, and refusals in our words."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from millstream import Mill, ProcessSettings, Topic, connect
from millstream.broker import Role, User
from millstream.errors import (
    ApiError,
    ConfigError,
    GroupNotFound,
    PermissionDenied,
    SchemaNotFound,
    SubscriptionNotFound,
    TopicNotFound,
    WrongSequence,
)
from millstream.settings import ConnectionSettings, Secret
from millstream.spark.broker_access import find_topics
from millstream.testing import running_broker
from millstream.wire.sync.connection import BlockingConnection, BlockingJetStream

MEMORY: dict[str, Any] = {"storage": "memory"}


@dataclass
class Order:
    price: int


@pytest.fixture
async def orders(mill: Mill) -> Topic:
    return await mill.create_topic("orders", **MEMORY)


async def test_of_topics_also_of_partitioned_ones(mill: Mill, orders: Topic) -> None:
    await mill.create_topic("payments", partitions=3, **MEMORY)
    text = "there is no topic or stream 'order'. "
    for call in (mill.topic, mill.table, mill.delete_topic, mill.promote_topic):
        with pytest.raises(TopicNotFound) as caught:
            await call("order")
        assert str(caught.value) == f"{text}Did you mean 'orders'?"
    with pytest.raises(TopicNotFound, match=r"Did you mean 'payments'\?$"):
        await mill.edit_topic("payment", max_age="1h")
    with pytest.raises(TopicNotFound, match=r"to copy from.*Did you mean 'orders'\?$"):
        await mill.create_topic("copy", mirror="ordes")
    with pytest.raises(TopicNotFound, match=r"check the name$"):
        await mill.topic("weather")


async def test_of_topics_that_spark_reads(orders: Topic, millstream_url: str) -> None:
    def find(name: str) -> None:
        with BlockingConnection(ConnectionSettings(urls=(millstream_url,))) as connection:
            find_topics(BlockingJetStream(connection), [name])

    await asyncio.to_thread(find, "orders")
    with pytest.raises(TopicNotFound, match=r"stream 'oders'\. .*Did you mean 'orders'\?$"):
        await asyncio.to_thread(find, "oders")


async def test_of_subscriptions(orders: Topic) -> None:
    subscriptions = orders.subscriptions
    await subscriptions.create("billing")
    for call in (
        lambda: subscriptions.info("biling"),
        lambda: subscriptions.lag("biling"),
        lambda: subscriptions.pause("biling"),
        lambda: subscriptions.resume("biling"),
        lambda: subscriptions.delete("biling"),
        lambda: subscriptions.edit("biling", ack_wait=3),
        lambda: orders.dead_letters("biling"),
    ):
        with pytest.raises(SubscriptionNotFound, match=r"Did you mean 'billing'\?$") as caught:
            await call()
        assert "Create it first" not in str(caught.value)


async def test_of_groups_and_schemas(mill: Mill, orders: Topic) -> None:
    async with orders.group("ledger"):
        pass
    with pytest.raises(GroupNotFound, match=r"Did you mean 'ledger'\?$"):
        await orders.groups.info("leger")
    await mill.create_topic("typed", schema=Order, **MEMORY)
    with pytest.raises(SchemaNotFound, match=r"Did you mean 'typed'\?$"):
        await mill.schemas.topic("type")


async def test_a_second_subscription_of_a_work_queue_is_explained(mill: Mill) -> None:
    jobs = await mill.create_topic("jobs", retention="workqueue", **MEMORY)
    await jobs.subscriptions.create("first")
    with pytest.raises(ApiError) as caught:
        await jobs.subscriptions.create("second")
    assert str(caught.value).startswith(
        "the broker refused to create or change subscription 'second' of topic 'jobs': the topic "
        "is a work queue and has a subscription already (error 10099). A work queue gives each"
    )


async def test_a_user_without_permission_reads_what_was_refused() -> None:
    users = (
        User("root", Secret("pw"), Role.ADMIN),
        User("ann", Secret("pw"), Role.APP),
        User("eve", Secret("pw"), Role.READER),
        User("bob", Secret("pw"), Role.APP, topics=("orders",)),
    )
    async with running_broker(users=users, guards=False) as broker:

        def url(user: str) -> str:
            return broker.url.replace("://", f"://{user}:pw@", 1)

        async with connect(url("root")) as root, connect(url("ann")) as ann:
            await root.create_topic("orders")
            with pytest.raises(PermissionDenied, match="user 'ann' may not delete topic 'orders'"):
                await ann.delete_topic("orders")
        async with connect(url("eve")) as eve:
            with pytest.raises(PermissionDenied) as caught:
                await eve.create_topic("mine")
            assert str(caught.value).startswith("user 'eve' may not create topic 'mine'.")
            assert caught.value.subject == "$JS.API.STREAM.CREATE.mine"
            topic = await eve.topic("orders")
            with pytest.raises(PermissionDenied, match="create or change subscription 's' of"):
                await topic.subscribe("s", max_deliver=3)
            with pytest.raises(TopicNotFound, match=r"Did you mean 'orders'\?$"):
                await eve.topic("ordesr")
        async with connect(url("bob")) as bob:  # who may not list topics
            with pytest.raises(PermissionDenied, match="user 'bob' may not open topic 'ordesr'"):
                await bob.topic("ordesr")


async def test_what_is_no_list_no_dict_and_no_function_is_refused(
    mill: Mill, orders: Topic
) -> None:
    """Text is no list of letters, and a handler that cannot be called would fail for ever."""
    wrong: Any = None
    letters: Any = ["a"]
    number: Any = 4222
    for one in ("flour", b"flour", {"flour": 3}):
        with pytest.raises(ConfigError, match="give a list of events, found one"):
            await orders.publish_many(one)
    with pytest.raises(ConfigError, match="headers are a dict of text, found list"):
        await orders.publish("flour", headers=letters)
    assert (await orders.info()).messages == 0
    with pytest.raises(ConfigError, match="a handler must be a function"):
        mill.process(orders, orders, wrong, ProcessSettings("p"))
    with pytest.raises(ConfigError, match="a handler must be a function"):
        mill.subscribe("a", handler=letters)
    address: Any = "https://ann:pw@example.com"
    with pytest.raises(ConfigError, match=r"HttpPushSettings\(url\), found str$"):
        orders.http_push("s", address)
    async with orders.subscribe("s") as subscription, orders.group("g") as group:
        with pytest.raises(ConfigError, match="a handler must be a function"):
            await subscription.run(wrong)
        with pytest.raises(ConfigError, match="a handler must be a function"):
            await group.run(wrong)
    with pytest.raises(ConfigError, match=r"a server address is text, found 4222"):
        connect(number)


async def test_a_process_with_a_name_of_its_own_takes_topics_with_long_names(mill: Mill) -> None:
    one, other = [await mill.create_topic(letter * 120, **MEMORY) for letter in "ab"]
    with pytest.raises(ConfigError, match="process"):
        one.process(other, lambda event: [])
    assert one.process(other, lambda event: [], name="short").settings.name == "short"
    assert one.process(other, lambda event: [], ProcessSettings("p")).settings.name == "p"


async def test_a_lost_race_says_what_to_do(mill: Mill) -> None:
    stock = await mill.create_table("stock")
    await stock.put("flour", "12")
    with pytest.raises(WrongSequence, match=r"wrong last sequence: 1 .*read the last event again"):
        await stock.put("flour", "11", revision=99)
