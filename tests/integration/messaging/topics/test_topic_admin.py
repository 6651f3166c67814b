"""Declaring, opening, changing, emptying and deleting topics on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from millstream.broker import Account, Role, User
from millstream.errors import (
    ApiError,
    ConfigError,
    NotReplicated,
    SubscriptionNotFound,
    TopicConflict,
    TopicNotFound,
)
from millstream.events.subject import key_token, partition_of
from millstream.messaging.topics.admin import (
    Purge,
    declare,
    delete,
    edit,
    list_topics,
    open_topic,
    purge,
)
from millstream.messaging.topics.settings import TopicSettings
from millstream.messaging.topics.stream_config import to_stream_configs
from millstream.settings import ConnectionSettings, Secret
from millstream.testing import running_broker
from millstream.wire.aio import jetstream
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import ConsumerConfig
from tests.integration.messaging.cut_proxy import proxy
from tests.integration.messaging.topic_kit import offsets, put

Connect = Callable[..., Awaitable[Connection]]


@pytest.fixture
def js(connection: Connection) -> JetStream:
    return JetStream(connection)


async def names(js: JetStream) -> list[str]:
    return sorted([info.config["name"] for info in await js.streams()])


# -- declaring ----------------------------------------------------------------------------


async def test_a_declared_topic_has_its_settings_partitions_and_features(js: JetStream) -> None:
    settings = TopicSettings(
        partitions=3, max_age="7d", max_bytes="1GiB", max_messages=10, metadata={"team": "shop"}
    )
    info = await declare(js, "orders", settings)
    assert await names(js) == ["orders-0", "orders-1", "orders-2"]
    assert info.settings == settings
    assert [part.subjects for part in info.partitions] == [
        ("orders.0.>",),
        ("orders.1.>",),
        ("orders.2.>",),
    ]
    for part in info.partitions:
        on = ("allow_direct", "allow_atomic", "allow_msg_ttl")
        assert all(part.config[feature] for feature in on)
        assert not any(map(part.config.get, ("allow_rollup_hdrs", "allow_msg_schedules")))
        assert part.config["max_consumers"] == 100_000
    assert info == await open_topic(js, "orders")


async def test_declaring_the_same_again_changes_nothing(js: JetStream) -> None:
    settings = TopicSettings(partitions=2, max_age="1h")
    first = await declare(js, "orders", settings)
    await put(js.connection, "orders.0.a")
    again = await declare(js, "orders", TopicSettings(partitions=2, max_age=3600))
    assert again.messages == 1
    assert again.created == first.created
    assert [part.config for part in again.partitions] == [part.config for part in first.partitions]


async def test_many_clients_may_declare_the_same_topic_together(js: JetStream) -> None:
    settings = TopicSettings(partitions=4)
    infos = await asyncio.gather(*(declare(js, "orders", settings) for _ in range(8)))
    assert {len(info.partitions) for info in infos} == {4}
    assert len(await names(js)) == 4


async def test_a_conflict_names_the_setting_and_how_to_change_it(js: JetStream) -> None:
    await declare(js, "orders", TopicSettings(max_age="1d"))
    with pytest.raises(TopicConflict) as caught:
        await declare(js, "orders", TopicSettings(max_age="7d", storage="memory"))
    text = str(caught.value)
    assert "topic 'orders' exists with other settings" in text
    assert "max_age is 1d, wanted 7d (edit_topic(..., max_age=...))" in text
    assert "storage is file, wanted memory (cannot be changed" in text
    assert (await open_topic(js, "orders")).settings.max_age == timedelta(days=1)


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1), (2, 3)])
async def test_another_number_of_partitions_is_a_conflict(
    js: JetStream, first: int, second: int
) -> None:
    await declare(js, "orders", TopicSettings(partitions=first))
    before = await names(js)
    with pytest.raises(TopicConflict, match=f"partitions is {first}, wanted {second}"):
        await declare(js, "orders", TopicSettings(partitions=second))
    assert await names(js) == before


async def test_an_incomplete_topic_is_completed_by_the_next_declare(
    js: JetStream,
) -> None:
    settings = TopicSettings(partitions=3, max_age="1h")
    await js.create_stream(to_stream_configs("orders", settings)[0])
    await put(js.connection, "orders.0.a")
    with pytest.raises(TopicNotFound, match="of 3 partitions 1, 2 are missing"):
        await open_topic(js, "orders")
    (listed,) = await list_topics(js)
    assert listed.missing == (1, 2)
    with pytest.raises(TopicConflict, match="max_age"):
        await declare(js, "orders", TopicSettings(partitions=3))
    info = await declare(js, "orders", settings)
    assert (info.missing, info.messages, len(info.partitions)) == ((), 1, 3)


async def test_a_stream_name_of_another_topic_is_refused_before_anything_is_created(
    js: JetStream,
) -> None:
    await declare(js, "orders-1")
    with pytest.raises(TopicConflict, match="needs the stream 'orders-1', which belongs to the"):
        await declare(js, "orders", TopicSettings(partitions=3))
    assert await names(js) == ["orders-1"]
    await delete(js, "orders-1")
    await declare(js, "orders", TopicSettings(partitions=3))
    with pytest.raises(TopicConflict, match="'orders-1' is partition 1 of the topic 'orders'"):
        await declare(js, "orders-1")


async def test_subjects_of_another_stream_are_reported_with_their_owner(
    js: JetStream,
) -> None:
    await js.create_stream({"name": "LEGACY", "subjects": ["orders.eu.*", "other"]})
    with pytest.raises(TopicConflict) as caught:
        await declare(js, "orders")
    assert "needs the subjects orders.>" in str(caught.value)
    assert "'LEGACY' (orders.eu.*, other)" in str(caught.value)
    info = await declare(js, "orders", TopicSettings(prefix="shop.orders"))
    assert info.prefix == "shop.orders"
    assert await put(js.connection, "shop.orders.a") == 1


async def test_a_foreign_stream_is_not_taken_over(js: JetStream) -> None:
    await js.create_stream({"name": "orders", "subjects": ["orders.>"]})
    with pytest.raises(TopicConflict, match=r"Millstream did not declare, with subjects orders\.>"):
        await declare(js, "orders")


async def test_a_topic_of_a_newer_layout_is_not_changed(js: JetStream) -> None:
    (config,) = to_stream_configs("orders", TopicSettings())
    config["metadata"]["millstream.version"] = "2"
    await js.create_stream(config)
    with pytest.raises(TopicConflict, match="layout 2 of a newer Millstream"):
        await declare(js, "orders")
    with pytest.raises(TopicConflict, match="Upgrade"):
        await edit(js, "orders", {"max_age": "1h"})


async def test_replicas_on_a_single_node_are_refused_with_the_reason(js: JetStream) -> None:
    with pytest.raises(NotReplicated, match=r"single node .*Replicas need a cluster"):
        await declare(js, "orders", TopicSettings(replicas=3))
    await declare(js, "orders")
    with pytest.raises(NotReplicated, match="single node"):
        await edit(js, "orders", {"replicas": 3})


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "-a", "x" * 250])
async def test_an_invalid_name_is_refused(js: JetStream, name: str) -> None:
    with pytest.raises(ConfigError):
        await declare(js, name)


async def test_an_account_with_few_consumers_may_still_have_topics() -> None:
    async with running_broker(
        accounts=(Account("small", max_consumers=5),),
        users=(User("u", Secret("p"), Role.ADMIN, "small"),),
    ) as broker:
        settings = ConnectionSettings(urls=(broker.url,), user="u", password=Secret("p"))
        connection = Connection(settings)
        await connection.open()
        try:
            js = JetStream(connection)
            info = await declare(js, "orders")
            assert info.partitions[0].config["max_consumers"] == -1
            assert (await declare(js, "orders")).created == info.created
            with pytest.raises(ApiError, match="as many subscriptions as it may have"):
                await declare(js, "other", TopicSettings(max_subscriptions=100))
        finally:
            await connection.close()


# -- opening and looking ------------------------------------------------------------------


async def test_any_stream_can_be_opened_as_it_is(js: JetStream) -> None:
    await js.create_stream(
        {"name": "Old_Stuff", "subjects": ["ev.*", "audit"], "max_age": 60_000_000_000}
    )
    await put(js.connection, "ev.a")
    info = await open_topic(js, "Old_Stuff")
    assert (info.managed, info.prefix, info.settings.partitions) == (False, None, 1)
    assert info.settings.max_age == timedelta(minutes=1)
    (part,) = info.partitions
    assert (part.stream, part.subjects, part.messages) == ("Old_Stuff", ("ev.*", "audit"), 1)


async def test_one_partition_can_be_opened_by_the_name_of_its_stream(js: JetStream) -> None:
    await declare(js, "orders", TopicSettings(partitions=2))
    info = await open_topic(js, "orders-1")
    assert (info.settings.partitions, info.partitions[0].prefix) == (1, "orders.1")
    for refused in (edit(js, "orders-1", {"max_age": "1h"}), delete(js, "orders-1")):
        with pytest.raises(TopicConflict, match="partition 1 of the topic 'orders'"):
            await refused


@pytest.mark.parametrize("name", ["nothing", "a.b", ""])
async def test_a_missing_topic_is_not_found(js: JetStream, name: str) -> None:
    with pytest.raises((TopicNotFound, ConfigError)) as caught:
        await open_topic(js, name)
    assert repr(name) in str(caught.value)


async def test_info_counts_what_is_stored(js: JetStream) -> None:
    started = datetime.now(UTC)
    empty = await declare(js, "orders", TopicSettings(partitions=2))
    assert [(part.first_offset, part.last_offset) for part in empty.partitions] == [(1, 0), (1, 0)]
    assert empty.partitions[0].first_time is None
    for key in ("a", "a", "b"):
        await put(js.connection, f"orders.0.{key}")
    await put(js.connection, "orders.1.c")
    for stream in ("orders-0", "orders-1"):
        await js.create_consumer(stream, ConsumerConfig(durable_name="s", ack_policy="explicit"))
    await purge(js, "orders", Purge(before=2, partition=0))
    info = await open_topic(js, "orders")
    zero = info.partitions[0]
    assert (zero.first_offset, zero.last_offset, zero.messages, zero.keys) == (2, 3, 2, 2)
    assert (info.messages, info.subscriptions, info.lag) == (3, 1, None)
    assert info.bytes == sum(part.bytes for part in info.partitions) > 0
    assert zero.first_time is not None
    assert zero.last_time is not None
    assert started <= zero.first_time <= zero.last_time <= datetime.now(UTC)


async def test_listing_groups_the_partitions_of_a_topic(js: JetStream) -> None:
    await declare(js, "orders", TopicSettings(partitions=3))
    await declare(js, "users")
    await js.create_stream({"name": "KV_x", "subjects": ["$KV.x.>"]})
    listed = await list_topics(js)
    found = [(info.name, len(info.partitions), info.managed) for info in listed]
    assert found == [("KV_x", 1, False), ("orders", 3, True), ("users", 1, True)]
    assert listed[1] == await open_topic(js, "orders")


# -- changing -----------------------------------------------------------------------------


async def test_an_edit_changes_every_partition_and_nothing_else(js: JetStream) -> None:
    await declare(js, "orders", TopicSettings(partitions=2, max_bytes="1GiB"))
    await put(js.connection, "orders.1.a")
    info = await edit(
        js, "orders", {"max_age": "1d", "compression": "s2", "metadata": {"owner": "ann"}}
    )
    assert info.messages == 1
    assert {part.config["max_age"] for part in info.partitions} == {86_400_000_000_000}
    wanted = TopicSettings(
        partitions=2,
        max_bytes="1GiB",
        max_age="1d",
        compression="s2",
        metadata={"owner": "ann"},
    )
    assert info.settings == wanted
    assert (await declare(js, "orders", wanted)).created == info.created


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"partitions": 4}, "a key's partition depends on how many there are"),
        ({"storage": "memory"}, "stored events do not move"),
        ({"retention": "workqueue"}, "a work queue cannot become another topic"),
        ({"message_ttl": False}, "stored events may have a time to live"),
        ({"prefix": "other"}, "keep their subjects"),
        ({"mirror": "x"}, "mix the offsets"),
        ({"sources": ["x"]}, "events are published to it"),
    ],
)
async def test_what_cannot_be_changed_is_refused_with_the_reason(
    js: JetStream, change: dict[str, object], says: str
) -> None:
    before = await declare(js, "orders")
    with pytest.raises(TopicConflict) as caught:
        await edit(js, "orders", {"max_age": "5m", **change})
    assert says in str(caught.value)
    assert await open_topic(js, "orders") == before


async def test_an_unknown_or_bad_setting_is_refused_before_anything_is_asked(
    js: JetStream,
) -> None:
    await declare(js, "orders")
    with pytest.raises(ConfigError, match="unknown setting 'maxage'"):
        await edit(js, "orders", {"maxage": "1h"})
    with pytest.raises(ConfigError, match="max_age: not a duration: 'soon'"):
        await edit(js, "orders", {"max_age": "soon"})


async def test_an_incomplete_edit_is_seen_and_completed(js: JetStream) -> None:
    await declare(js, "orders", TopicSettings(partitions=2))
    config = to_stream_configs("orders", TopicSettings(partitions=2, max_age="1h"))[0]
    await js.update_stream(config)
    assert (await open_topic(js, "orders")).uneven
    info = await edit(js, "orders", {"max_age": "1h"})
    assert not info.uneven
    assert {part.config["max_age"] for part in info.partitions} == {3_600_000_000_000}


async def test_a_foreign_stream_can_be_edited_and_keeps_the_rest(js: JetStream) -> None:
    await js.create_stream(
        {
            "name": "OLD",
            "subjects": ["ev.>"],
            "republish": {"src": "ev.>", "dest": "seen.>"},
            "metadata": {"by": "terraform"},
        }
    )
    info = await edit(js, "OLD", {"max_age": "1h", "description": "kept"})
    config = info.partitions[0].config
    assert config["republish"] == {"src": "ev.>", "dest": "seen.>"}
    assert config["subjects"] == ["ev.>"]
    assert config["metadata"]["by"] == "terraform"
    assert (config["max_age"], config["description"]) == (3_600_000_000_000, "kept")
    assert not info.managed


# -- emptying and deleting ----------------------------------------------------------------


async def test_purge_removes_all_all_but_some_or_those_before_an_offset(js: JetStream) -> None:
    await declare(js, "orders", TopicSettings(partitions=2))
    for _ in range(5):
        for partition in (0, 1):
            await put(js.connection, f"orders.{partition}.a")
    assert await purge(js, "orders", Purge(keep=4)) == 2
    assert await purge(js, "orders", Purge(before=4, partition=1)) == 2
    assert await offsets(js, "orders-1") == [4, 5]
    with pytest.raises(ConfigError, match="Give the partition as well"):
        await purge(js, "orders", Purge(before=2))
    with pytest.raises(ConfigError, match="no partition 7"):
        await purge(js, "orders", Purge(partition=7))
    assert await purge(js, "orders", Purge(keep=0)) == 6
    assert await put(js.connection, "orders.0.a") == 6


async def test_purge_by_key_takes_only_that_key(js: JetStream) -> None:
    await declare(js, "orders", TopicSettings(partitions=3))
    for key in ("a.b", "c", "a.b", "d"):
        home = partition_of(key, 3)
        await put(js.connection, f"orders.{home}.{key_token(key)}")
    assert await purge(js, "orders", Purge(key="a.b", keep=1)) == 1
    assert await purge(js, "orders", Purge(key="a.b")) == 1
    assert await purge(js, "orders", Purge(subject="orders.*.c")) == 1
    assert (await open_topic(js, "orders")).messages == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": "a", "subject": "b"},
        {"before": 1, "keep": 1},
        {"before": 0},
        {"keep": -1},
        {"subject": "a..b"},
    ],
)
def test_a_purge_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Purge(**wrong)  # type: ignore[arg-type]


async def test_a_server_that_answers_late_is_asked_again_and_its_first_answer_counts(
    connect: Connect, millstream_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxy(millstream_url) as (line, url):
        js = JetStream(await connect(url))
        await declare(js, "orders")
        for _ in range(3):
            await put(js.connection, "orders.a")
        monkeypatch.setattr(jetstream, "ATTEMPT_SECONDS", 0.02)
        questions: list[tuple[Callable[[], Awaitable[object]], object]] = [
            (partial(js.purge_stream, "orders"), 3),
            (partial(js.delete_message, "orders", 1), ApiError),
            (partial(js.delete_consumer, "orders", "nobody"), SubscriptionNotFound),
        ]
        for ask, said in questions:
            line.freeze()
            asking = asyncio.gather(ask(), return_exceptions=True)
            await asyncio.sleep(0.2)
            line.thaw()
            [answer] = await asking
            assert said in (answer, type(answer))


async def test_a_deleted_topic_is_gone_and_deleting_it_again_is_an_error(js: JetStream) -> None:
    await declare(js, "orders", TopicSettings(partitions=3))
    await delete(js, "orders")
    assert await names(js) == []
    with pytest.raises(TopicNotFound, match="no topic or stream 'orders'"):
        await delete(js, "orders")
    await delete(js, "orders", missing_ok=True)


async def test_a_delete_that_stopped_half_way_can_be_repeated(js: JetStream) -> None:
    await declare(js, "orders", TopicSettings(partitions=3))
    await js.delete_stream("orders-2")  # what the first steps of a delete leave
    await js.delete_stream("orders-1")
    await delete(js, "orders")
    assert await names(js) == []


async def test_many_clients_may_delete_the_same_topic_together(js: JetStream) -> None:
    await declare(js, "orders", TopicSettings(partitions=4))
    await asyncio.gather(*(delete(js, "orders", missing_ok=True) for _ in range(5)))
    assert await names(js) == []
