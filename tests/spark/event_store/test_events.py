"""The events of an event store as a DataFrame."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest

from millstream import Mill, Personal
from tests.spark.conftest import Account, Lake, forget_commit, last_batch
from tests.spark.event_store.accounts import EVENTS, Deposited, Opened, Withdrawn
from tests.spark.event_store.store_kit import Store, collected, rows


@pytest.fixture
def store(account: Account) -> Store:
    return Store(account)


def deposits(name: str, **fields: Any) -> type:
    """Another version of the class of deposits."""
    return dataclass(type("Deposited", (), {"__annotations__": fields, "__doc__": name}))


def test_rows_are_the_events_of_the_sdk(lake: Lake, store: Store) -> None:
    old = deposits("one", amount=int)
    store.append("a1", old(3), old(4), classes=[Opened, old, Withdrawn])
    store.append_randomly(1, 60, partitions=1)
    store.append("gone", Opened("eve"))
    store.delete("gone")
    found = lake.read(eventStore="accounts", minPartitions=4)
    assert collected(found.collect()) == rows(store.events())
    assert found.where("event = 'Deleted'").select("aggregate", "version").collect() == [
        ("gone", 2)
    ]


@dataclass(frozen=True)
class Registered:
    name: Annotated[str, Personal()]
    city: str


@dataclass(frozen=True)
class Left:
    pass


def test_files_hold_personal_fields_sealed_and_events_may_have_no_fields(
    lake: Lake, account: Account, tmp_path: Path
) -> None:
    async def work(mill: Mill) -> None:
        store = await mill.event_store("people", events=[Registered, Left])
        await store.append("p1", [Registered("Ann Smith", "Bath"), Left()])

    account.run(work)
    found = lake.read(eventStore="people").select("event", "Registered", "Left")
    found.write.parquet(str(tmp_path / "lake"))
    first, second = found.sparkSession.read.parquet(str(tmp_path / "lake")).collect()
    assert (first.event, first.Registered.city, first.Left) == ("Registered", "Bath", None)
    # So the file can be read no more than the log when the person is erased.
    assert first.Registered.name.startswith("mill:enc:1:")
    assert (second.event, second.Registered) == ("Left", None)
    assert second.Left is not None


def test_a_stream_gives_every_event_once_in_batches(lake: Lake, store: Store) -> None:
    store.append_randomly(2, 40, partitions=2)
    frame = lake.stream(eventStore="accounts", maxOffsetsPerTrigger=15)
    checkpoint = lake.checkpoint()
    first, _ = lake.collect(frame, checkpoint)
    store.append_randomly(3, 10)
    second, _ = lake.collect(frame, checkpoint)
    expected = rows(store.events())
    assert collected([*first, *second]) == sorted(
        expected, key=lambda row: (row["partition"], row["offset"], row["index"])
    )


def test_a_batch_that_runs_again_writes_nothing_twice(
    lake: Lake, store: Store, account: Account
) -> None:
    store.append_randomly(4, 30)
    account.topic("copies")
    frame = lake.stream(eventStore="accounts", maxOffsetsPerTrigger=10).selectExpr(
        "aggregate AS key", "concat(offset, '/', index) AS value"
    )
    checkpoint = lake.checkpoint()
    lake.run(frame, checkpoint, topic="copies")
    forget_commit(checkpoint, last_batch(checkpoint))
    lake.run(frame, checkpoint, topic="copies")
    expected = [f"{event.offset}/{event.index}".encode() for event in store.events()]
    assert sorted(account.values("copies")) == sorted(expected)


def test_columns_and_fields_are_read_alone(lake: Lake, store: Store) -> None:
    store.append("a1", Opened("ann"), Deposited(5), Withdrawn(2, "rent"))
    some = lake.read(eventStore="accounts", columns="version,Deposited.amount,Withdrawn")
    assert some.columns == ["version", "Deposited", "Withdrawn"]
    assert [row.asDict(recursive=True) for row in some.collect()] == [
        {"version": 1, "Deposited": None, "Withdrawn": None},
        {"version": 2, "Deposited": {"amount": 5}, "Withdrawn": None},
        {"version": 3, "Deposited": None, "Withdrawn": {"amount": 2, "note": "rent"}},
    ]
    own = lake.read(
        eventStore="accounts", schema="Withdrawn STRUCT<note: STRING>, aggregate STRING"
    )
    assert own.collect()[2].asDict(recursive=True) == {
        "Withdrawn": {"note": "rent"},
        "aggregate": "a1",
    }
    assert lake.read(eventStore="accounts").count() == 3
    headers = lake.read(eventStore="accounts", columns="version", includeHeaders="true")
    assert headers.columns == ["version", "headers"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": "Deposit"}, "did you mean 'Deposited'"),
        ({"columns": "Deposited.amont"}, "has no field 'amont'"),
        ({"columns": "version.x"}, "choose an event's column or some of its fields"),
        ({"columns": "Deposited,Deposited.amount"}, "choose an event's column or some"),
        ({"asOf": "yesterday"}, "write it like"),
        ({"asOf": "2026-01-01T00:00:00"}, "no time zone"),
        ({"asOfClock": "event"}, "needs the option 'asOf'"),
        ({"asOf": "0", "startingOffsets": "earliest"}, "cannot be combined with the option 'asOf'"),
        ({"asOf": "0", "state": "Account"}, "write it like module:Class"),
        ({"asOf": "0", "state": "nowhere:Account"}, "cannot be imported where Spark runs Python"),
        ({"asOf": "0", "state": "decimal:Decimal"}, "has no class 'Opened'"),
        ({"upcasters": "nonsense"}, "make its text with millstream.spark.event_upcasters"),
        ({"subscribe": "accounts"}, "cannot be combined"),
    ],
)
def test_wrong_options_are_refused_with_what_to_do(
    lake: Lake, store: Store, options: dict[str, str], message: str
) -> None:
    store.open()
    with pytest.raises(Exception, match=message):
        lake.read(eventStore="accounts", **options).collect()


def test_what_is_no_store_is_refused(lake: Lake, account: Account) -> None:
    account.topic("orders")
    with pytest.raises(Exception, match="is a topic and not an event store"):
        lake.read(eventStore="orders").collect()
    with pytest.raises(Exception, match="no topic"):
        lake.read(eventStore="nothing").collect()
    with pytest.raises(Exception, match="needs the option 'eventStore'"):
        lake.read(subscribe="orders", upcasters="x").collect()


def test_events_that_cannot_be_decoded_follow_the_policy(lake: Lake, store: Store) -> None:
    store.append("a1", Opened("ann"))
    store.by_hand(
        "a1", {"Mill-Versions": "2-3"}, b'{"Opened":{"owner":5}}\n{"Opened":{"owner":"x"}}'
    )
    store.by_hand("a1", {"Mill-Versions": "4-4"}, b'{"Unheard":{"of":1}}')
    store.by_hand("b", {}, b"hello")  # not of the store: left out
    store.append("c", Deposited(1))
    with pytest.raises(Exception, match=r"accounts.*offset 2"):
        lake.read(eventStore="accounts").collect()
    shown = lake.read(eventStore="accounts", undecodable="null").orderBy("offset", "index")
    found = [(row.offset, row["index"], row.event, row.reason) for row in shown.collect()]
    assert [row[:3] for row in found] == [
        (1, 0, "Opened"), (2, 0, "Opened"), (2, 1, "Opened"), (3, 0, None), (5, 0, "Deposited"),
    ]  # fmt: skip
    reasons = [row[3] for row in found]
    assert "owner" in reasons[1]
    assert "'Unheard' is not an event of the store" in reasons[3]
    assert [reasons[n] for n in (0, 2, 4)] == [None] * 3
    dropped = lake.read(eventStore="accounts", undecodable="drop").collect()
    assert [row.offset for row in dropped] == [1, 2, 5]


def test_old_versions_need_a_rule_or_a_function(lake: Lake, store: Store) -> None:
    from millstream.spark import event_upcasters

    cents = deposits("cents", cents=str)
    upcasters = {("Deposited", 1): lambda old: {"amount": int(old["cents"]), "tags": ["old"]}}
    store.append("a1", cents("12"), classes=[Opened, cents, Withdrawn])
    store.how = {"upcasters": upcasters}
    store.append_randomly(5, 5)
    with pytest.raises(Exception, match=r"version 1 of event 'Deposited'.*upcasters="):
        lake.read(eventStore="accounts").collect()
    # A query that does not read deposits needs no function.
    assert lake.read(eventStore="accounts", columns="Opened,version").count() > 1
    found = lake.read(eventStore="accounts", upcasters=event_upcasters(upcasters))
    assert collected(found.collect()) == rows(store.events())
    assert found.collect()[0].Deposited.asDict() == {
        "amount": 12,
        "currency": "EUR",
        "tags": ["old"],
    }


def test_a_running_query_reads_versions_and_types_that_are_registered_later(
    lake: Lake, store: Store
) -> None:
    @dataclass
    class Closed:
        reason: str

    first = deposits("one", amount=int)
    store.append("a1", first(1), classes=[Opened, first, Withdrawn])
    frame = lake.stream(eventStore="accounts")
    checkpoint = lake.checkpoint()
    store.append("a1", Deposited(2, "USD"))
    store.append("a1", Closed("moved"), classes=[*EVENTS, Closed])
    found, _ = lake.collect(frame, checkpoint)
    assert [(row.event, row.Deposited and row.Deposited.asDict()) for row in found] == [
        ("Deposited", {"amount": 1}),
        ("Deposited", {"amount": 2}),
        ("Closed", None),
    ]
    # A query that is built now has the new version and type.
    again = lake.read(eventStore="accounts").collect()
    assert [row.Deposited and row.Deposited.currency for row in again] == ["EUR", "USD", None]
    assert again[2].Closed.reason == "moved"


def test_a_filter_by_aggregate_reads_its_events_only(lake: Lake, store: Store) -> None:
    store.append_randomly(6, 40)
    every = lake.read(eventStore="accounts").collect()
    for id in ("b.2", "ä b"):
        found = lake.read(eventStore="accounts").where(f"aggregate = '{id}'").collect()
        assert found == [row for row in every if row.aggregate == id] != []


@dataclass
class Scanned:
    codes: dict[str, int]
    data: bytes
    at: list[float] = field(default_factory=list)


def test_types_that_only_the_codec_reads(lake: Lake, store: Store) -> None:
    store.append("x", Scanned({"a": 1}, b"\x00\xff", [0.1]), classes=[Scanned])
    row = lake.read(eventStore="accounts", columns="Scanned").collect()[0].asDict(recursive=True)
    assert row == {"Scanned": {"codes": {"a": 1}, "data": bytearray(b"\x00\xff"), "at": [0.1]}}
