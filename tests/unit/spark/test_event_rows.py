"""Rows of an event store, made from columns, are the events that the SDK reads one by one."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import SchemaError, Undecodable
from millstream.event_store.event_types import EventTypes
from millstream.event_store.ids import subject_of
from millstream.event_store.messages import open_append, stored_events
from millstream.events.event import Partition, datetime_of
from millstream.schemas import Schema, spark_arrow_type
from millstream.schemas import types as t
from millstream.schemas.registry.records import Version
from millstream.schemas.registry.stores import RegisteredEvent
from millstream.spark.source.event_columns import EventColumns, KnownEvents
from millstream.spark.source.event_rows import EventRows
from millstream.spark.source.event_schema import EVENT_COLUMNS, asked_fields, event_columns
from millstream.spark.source.frames import Frames, scan
from millstream.spark.source.offsets import PartitionState
from millstream.spark.stores import StoreSnapshot
from millstream.wire.message import RawMessage

OPENED = Schema(t.Record("Opened", (t.Field("owner", t.String()),)))
DEPOSITED_1 = Schema(t.Record("Deposited", (t.Field("amount", t.Int(32)),)))
DEPOSITED_2 = Schema(
    t.Record(
        "Deposited",
        (t.Field("amount", t.Int(64)), t.Field("note", t.Nullable(t.String()), None)),
    )
)
EVENTS = {"Opened": [OPENED], "Deposited": [DEPOSITED_1, DEPOSITED_2]}
STORE = StoreSnapshot(
    "accounts", {name: tuple(s.to_json() for s in schemas) for name, schemas in EVENTS.items()}
)
STATE = PartitionState("accounts", 0, "accounts", "accounts", "", 1, 1)
PARTITION = Partition("accounts", "accounts", 0, "accounts")
SECOND = 1_790_000_000_000_000_000


def types() -> EventTypes:
    events = [
        RegisteredEvent(name, tuple(schemas), Version(len(schemas), 0, schemas[-1].fingerprint))
        for name, schemas in EVENTS.items()
    ]
    return EventTypes("accounts", events, {}, {})


def message(number: int, id: str, headers: list[tuple[str, str]], payload: bytes) -> RawMessage:
    reply = f"$JS.ACK.accounts.c.1.{number}.{number}.{SECOND + number * 1_000_003}.0".encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    block = f"NATS/1.0\r\n{lines}\r\n".encode() if headers else b""
    return RawMessage(subject_of("accounts", id).encode(), reply, block, payload)


def frames_of(messages: list[RawMessage]) -> Frames:
    """The messages as they are on the wire."""
    data = b""
    for subject, reply, headers, payload in messages:
        sizes = b"%d %d" % (len(headers), len(headers) + len(payload))
        if headers:
            data += b"HMSG %b 1 %b %b\r\n" % (subject, reply, sizes)
        else:
            data += b"MSG %b 1 %b %d\r\n" % (subject, reply, len(payload))
        data += headers + payload + b"\r\n"
    found, used = scan(data, b"1", lambda line: None, large=False)
    assert (len(found), used) == (len(messages), len(data))
    return found


def columns(undecodable: str = "fail") -> pa.Schema:
    fields = [(name, kind) for name, (_, kind) in EVENT_COLUMNS.items() if name != "reason"]
    fields += [(name, spark_arrow_type(EVENTS[name][-1].record)) for name in EVENTS]
    return pa.schema([*fields, *([("reason", pa.string())] if undecodable == "null" else [])])


def rows_of(
    messages: list[RawMessage], undecodable: str = "fail", schema: pa.Schema | None = None
) -> list[dict[str, Any]]:
    schema = schema or columns(undecodable)
    # Nothing is registered after the query was built.
    known = KnownEvents(STORE, None, STORE.events.get, asked_fields(schema, STORE))
    rows = EventRows(schema, STATE, known, undecodable)
    found = [row for batch in rows.of(frames_of(messages)) for row in batch.to_pylist()]
    if undecodable == "drop":
        assert rows.dropped > 0
    return found


def expected(messages: list[RawMessage]) -> list[dict[str, Any]]:
    """What the SDK reads."""
    found = []
    known = types()
    appends = (open_append(PARTITION, raw) for raw in messages)
    events = [event for one in appends if one is not None for event in stored_events(one, known)]
    for event in events:
        row = {
            "aggregate": event.id,
            "version": event.version,
            "event": event.name,
            "timestamp": _micros(event.timestamp_ns),
            "stored": _micros(event.stored_ns),
            "partition": 0,
            "offset": event.offset,
            "index": event.index,
            "correlation_id": event.correlation_id,
            "causation_id": event.causation_id,
            "headers": [{"key": k, "value": v.encode()} for k, v in event.headers.items()] or None,
            "Opened": None,
            "Deposited": None,
        }
        if not event.deleted:
            row[event.name] = event.data
        found.append(row)
    return found


def _micros(nanoseconds: int) -> dt.datetime:
    return datetime_of(nanoseconds)


BODIES = st.one_of(
    st.builds(lambda o: ("Opened", b'{"owner":"%b"}' % o), st.sampled_from([b"ann", b"b\xc3\xa9"])),
    st.builds(lambda n: ("Deposited", b'{"amount":%d}' % n), st.integers(-5, 2**31 - 1)),
    st.builds(lambda n: ("Deposited.2", b'{"amount":%d,"note":null}' % n), st.integers(0, 2**60)),
    st.just(("Deposited.2", b'{"amount":7}')),
    st.just(("Deposited.2", b'{ "note" : "}}\\n{" , "amount" : 8 }')),
)
LINES = st.builds(
    lambda parts, form: form % (parts[0].encode(), parts[1]),
    BODIES,
    st.sampled_from([b'{"%b":%b}'] * 5 + [b' { "%b" : %b } ', b'{"%b":%b}\r']),
)
BAD_LINES = st.sampled_from(
    [b"", b"{}", b"x", b'{"Opened":{"owner":5}}', b'{"Nobody":{"a":1}}', b'{"Opened":null}',
     b'{"Deposited.2":{"amount":1.5}}', b'{"Deposited.9":{"amount":1}}', b'{"Opened.x":{"a":1}}',
     b'{"Opened":{"owner":"a"},"Deposited":{"amount":1}}', b'{"Opened":{"owner":"\xff"}}',
     b'{"Opened":{"owner":"a"}}{"Opened":{"owner":"b"}}', b'}}', b'{"', b'{"Opened":{']
)  # fmt: skip
IDS = st.sampled_from(["a", "a1", "course-1.bob", "ä b", "_x", "a..b"])


@st.composite
def appends(draw: st.DrawFn, damaged: bool = False) -> list[RawMessage]:
    found = []
    for number in range(1, draw(st.integers(1, 6)) + 1):
        lines = draw(st.lists(LINES, min_size=1, max_size=4))
        if damaged and draw(st.booleans()):
            lines[draw(st.integers(0, len(lines) - 1))] = draw(BAD_LINES)
        first = draw(st.integers(1, 10**12))
        last = first + len(lines) - 1
        headers = [("Nats-Msg-Id", "x" * draw(st.integers(1, 9)))]
        headers += draw(
            st.lists(
                st.sampled_from(
                    [("Mill-Time", "1700000000000000123"), ("Mill-Time", "soon"),
                     ("Mill-Correlation", "c 1"), ("Mill-Causation", "ü"), ("mine", "Mill-Null: 1"),
                     ("Mill-Time", "-5"), ("Mill-Other", "")]
                ),
                max_size=3,
                unique_by=lambda pair: pair[0],
            )
        )  # fmt: skip
        versions = ("Mill-Versions", f"{first}-{last}")
        kind = draw(st.sampled_from(["append"] * 6 + ["end", "own", "for", "other"]))
        payload = b"\n".join(lines)
        if kind == "end":
            versions, payload = ("Mill-Versions", f"{first}-{first}"), b""
            headers.append(("Mill-Null", "1"))
        elif kind == "for":
            headers.append(("Mill-For", "billing"))
        elif kind == "other" and damaged:
            odd = [
                "",
                "x",
                "5",
                "0-1",
                "5-4",
                "1-",
                "-1",
                "1-99999999999999999999",
                f"{first}-{last + 1}",
            ]
            versions = ("Mill-Versions", draw(st.sampled_from(odd)))
        headers.insert(draw(st.integers(0, len(headers))), versions)
        if kind == "other" and damaged and draw(st.booleans()):
            headers = []
        made = message(number, draw(IDS), headers, payload)
        if kind == "own":
            made = made._replace(subject=b"accounts._writer.x")
        found.append(made)
    return found


@settings(max_examples=60, deadline=None)
@given(appends())
def test_rows_are_the_events_that_the_sdk_reads(messages: list[RawMessage]) -> None:
    assert rows_of(messages) == expected(messages)


@settings(max_examples=60, deadline=None)
@given(appends(), st.sampled_from(["amount", "note"]))
def test_some_fields_of_an_event_are_those_of_the_whole(
    messages: list[RawMessage], name: str
) -> None:
    whole = columns()
    one = whole.field("Deposited").type.field(name)
    schema = pa.schema([("aggregate", pa.string()), ("Deposited", pa.struct([one]))])
    assert rows_of(messages, schema=schema) == [
        {
            "aggregate": row["aggregate"],
            "Deposited": row["Deposited"] and {name: row["Deposited"][name]},
        }
        for row in rows_of(messages)
    ]


@settings(max_examples=60, deadline=None)
@given(appends(damaged=True))
def test_what_the_sdk_cannot_read_has_a_reason(messages: list[RawMessage]) -> None:
    """Message by message, because the SDK stops at the first that it cannot read."""
    found = rows_of(messages, "null")
    wanted: list[dict[str, Any]] = []
    damaged: list[tuple[int, int]] = []
    for one in messages:
        try:
            wanted += expected([one])
        except (Undecodable, LookupError):
            damaged.append((int(one.reply.split(b".")[6]), 0))
    offsets = {offset for offset, _ in damaged}
    whole = [row for row in found if row["offset"] not in offsets]
    assert all(row.pop("reason") is None for row in whole)
    assert whole == wanted
    for offset in offsets:
        reasons = [row["reason"] for row in found if row["offset"] == offset]
        assert any(reasons)
    if damaged:
        with pytest.raises(Undecodable) as stopped:
            rows_of(messages)
        assert stopped.value.offset == min(offsets)
        assert len(rows_of(messages, "drop")) == sum(row.get("reason") is None for row in found)


def test_a_version_without_a_rule_or_a_function_is_refused_by_name() -> None:
    old = Schema(t.Record("Deposited", (t.Field("cents", t.String()),)))
    with pytest.raises(SchemaError, match=r"version 1 of event 'Deposited'.*upcasters="):
        EventColumns("accounts", "Deposited", [old, DEPOSITED_1], {})
    given = {("Deposited", 1): lambda event: {"amount": int(event["cents"])}}
    columns = EventColumns("accounts", "Deposited", [old, DEPOSITED_1], given)
    assert columns.column(1, b'{"cents":"12"}\n', 1).to_pylist() == [{"amount": 12}]


def test_events_named_like_a_column_have_another_one() -> None:
    store = StoreSnapshot("s", dict.fromkeys(("Opened", "opened", "Offset", "Offset_event"), ()))
    assert event_columns(store) == {
        "Opened": "Opened",
        "opened_event": "opened",
        "Offset_event": "Offset",
        "Offset_event_event": "Offset_event",
    }
