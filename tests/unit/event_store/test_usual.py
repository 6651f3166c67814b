"""Usual messages are read exactly as by the code that reads all of them, or left to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import errors
from millstream.event_store.event_types import EventTypes
from millstream.event_store.events import StoredEvent
from millstream.event_store.messages import open_append, stored_events
from millstream.event_store.usual import usual_events
from millstream.events.event import Partition
from millstream.schemas.declaration import declare
from millstream.schemas.registry.records import Version
from millstream.schemas.registry.stores import RegisteredEvent
from millstream.wire.message import RawMessage

PARTITION = Partition("MILL_accounts", "accounts", 0, "accounts")
REPLY = b"$JS.ACK.MILL_accounts.read.1.17.4.1763396038123456789.0"


@dataclass(frozen=True)
class Deposited:
    amount: int
    note: str = ""

    def __post_init__(self) -> None:
        if self.amount == 13:
            raise ValueError("no amount of 13")


class Rated(msgspec.Struct):
    rate: float
    small: bool | None = None


@dataclass(kw_only=True)
class Named:
    name: str


class Checked(pydantic.BaseModel):
    count: int


@dataclass
class Older:
    amount: int


def make_types() -> EventTypes:
    classes: dict[str, type] = {c.__name__: c for c in (Deposited, Rated, Named, Checked)}
    events = []
    for name, cls in classes.items():
        versions = (Older, cls) if cls is Deposited else (cls,)
        schemas = tuple(declare(version, name=name) for version in versions)
        last = Version(len(schemas), 1, schemas[-1].fingerprint)
        events.append(RegisteredEvent(name, schemas, last))
    return EventTypes("accounts", events, classes, {})


TYPES = make_types()


def exactly(raw: RawMessage) -> list[StoredEvent] | str | None:
    """What the code that reads every message makes of it: events, nothing, or a refusal."""
    try:
        append = open_append(PARTITION, raw)
        return None if append is None else list(stored_events(append, TYPES))
    except errors.MillstreamError as error:
        return str(error)


def usual(raw: RawMessage) -> list[StoredEvent] | None:
    """The events of a message on its own, if it is a usual one."""
    (found,) = usual_events(PARTITION, [raw], TYPES)
    return found


def message(
    payload: bytes, headers: bytes, subject: bytes = b"accounts.a1", reply: bytes = REPLY
) -> RawMessage:
    return RawMessage(subject, reply, b"NATS/1.0\r\n" + headers + b"\r\n", payload)


USUAL = (
    b"Nats-Msg-Id: x7\r\nMill-Versions: 3-3\r\nMill-Previous: 9,4\r\n"
    b"Nats-Expected-Last-Subject-Sequence: 9\r\n"
)


@pytest.mark.parametrize(
    ("line", "data"),
    [
        (b'{"Deposited.2":{"amount":5,"note":"x"}}', Deposited(5, "x")),
        (b'{"Deposited.2":{"amount":5}}', Deposited(5)),
        (b'{"Deposited":{"amount":5}}', Deposited(5)),
        (b'{"Rated":{"rate":1.5,"small":null}}', Rated(1.5)),
        (b'{"Named":{"name":"ann"}}', Named(name="ann")),
        (b'{"Checked":{"count":3}}', Checked(count=3)),
    ],
)
def test_events_of_every_kind_of_class_are_usual(line: bytes, data: Any) -> None:
    raw = message(line, USUAL)
    found = usual(raw)
    assert found == exactly(raw)
    assert found is not None
    (event,) = found
    assert event.data == data
    assert type(event.data) is type(data)
    assert (event.id, event.version, event.offset, event.index) == ("a1", 3, 17, 0)
    assert (event.append_id, event.headers, event.partition) == ("x7", {}, 0)


def test_an_append_with_everything_a_writer_may_give_but_headers_is_usual() -> None:
    headers = (
        b"Nats-Msg-Id: x7\r\nMill-Versions: 3-4\r\nNats-Expected-Last-Subject-Sequence: 9\r\n"
        b"Mill-Time: -5\r\nMill-Correlation: c1\r\nMill-Causation: c0\r\n"
        b"Nats-Batch-Id: b\r\nNats-Batch-Sequence: 1\r\nNats-Batch-Commit: 1\r\n"
    )
    raw = message(b'{"Rated":{"rate":1}}\n{"Deposited":{"amount":5}}', headers)
    found = usual(raw)
    assert found == exactly(raw)
    assert found is not None
    assert [(e.version, e.index, e.timestamp_ns) for e in found] == [(3, 0, -5), (4, 1, -5)]
    assert {(e.correlation_id, e.causation_id) for e in found} == {("c1", "c0")}


def test_what_is_refused_is_left_to_the_code_that_words_it() -> None:
    for line in (
        b'{"Deposited.2":{"amount":13}}',
        b'{"Deposited.2":{"amount":"5"}}',
        b'{"Deposited.2":{"amount":5,"more":1}}',
        b'{"Deposited.3":{"amount":5}}',
        b'{"Rated":{"rate":NaN}}',
        b'{"Checked":{"count":"x"}}',
        b'{"Checked":{"count":1}]',
        b'{"Checked":{"count":1},"Rated":{"rate":1}}',
        b'{"Checked":{"count":\n1}}',
        b"",
    ):
        raw = message(line, USUAL)
        assert usual(raw) is None
        assert isinstance(exactly(raw), str)


LINES = st.sampled_from([
    b'{"Deposited":{"amount":5}}', b'{"Deposited.2":{"amount":5,"note":"\xc3\xa4"}}',
    b'{"Deposited":{"amount":5}} ', b'{"Deposited":{"amount":5} }', b'{ "Deposited":{"amount":5}}',
    b'{"Deposited" :{"amount":5}}', b'{"Deposited.1":{"amount":5}}', b'{"Deposited.01":{}}',
    b'{"Deposited.2":{"amount":9223372036854775808}}', b'{"Deposited.2":{"amount":1.0}}',
    b'{"Deposited.2":{"note":"}}\\n","amount":5}}', b'{"Deposited.2":{"amount":5,"amount":6}}',
    b'{"Rated":{"rate":9007199254740993}}', b'{"Rated":{"rate":-0.0,"small":true}}',
    b'{"Rated":{"rate":1,"small":0}}', b'{"Named":{"name":"\\ud800"}}', b'{"Named":{"name":null}}',
    b'{"Checked":{"count":true}}', b'{"Checked":{"count":3}}', b'{"Unknown":{}}', b'{"":{}}',
    b'{"Rated":[]}', b'{"Rated}', b'{"Rated":{', b"null", b"", b"\xff",
])  # fmt: skip
ITEMS = st.sampled_from([
    b"Nats-Msg-Id: x7", b"Nats-Msg-Id: x 7 ", b"Nats-Msg-Id: ", b"Nats-Msg-Id:x",
    b"mill-versions: 2-2", b"Mill-Versions: 1-1", b"Mill-Versions: 2-3", b"Mill-Versions: 3-2",
    b"Mill-Versions: 0-0",
    b"Mill-Versions: 01-1", b"Mill-Versions: 1", b"Mill-Time: 5", b"Mill-Time: soon",
    b"Mill-Time: 999999999999999999999", b"Mill-Correlation: \xc3\xa4", b"Mill-Causation: c ",
    b"Mill-Null: 1", b"Mill-Pack: 1", b"Mill-For: billing", b"Mill-Archived: old", b"own: \xff",
    b"Nats-Expected-Last-Subject-Sequence: 0", b"Nats-Marker-Reason: MaxAge", b"Nats-Batch-Id: b",
])  # fmt: skip
ORDERED = st.lists(st.booleans(), min_size=6, max_size=6).map(
    lambda chosen: [
        item
        for item, here in zip(
            [
                b"Nats-Msg-Id: x7",
                b"Mill-Versions: 1-2",
                b"Nats-Expected-Last-Subject-Sequence: 0",
                b"Mill-Time: 7",
                b"Mill-Correlation: c",
                b"Mill-Causation: d",
            ],
            chosen,
            strict=True,
        )
        if here
    ]
)
SUBJECTS = st.sampled_from([
    b"accounts.a1", b"accounts.a.b", b"accounts.a=20b", b"accounts._", b"accounts._x.y",
    b"accounts.", b"accounts", b"accounts.\xc3\xa4", b"accounts.\xff", b"accounts.a._b",
])  # fmt: skip
REPLIES = st.sampled_from([
    REPLY, b"$JS.ACK.hub.hash.MILL_accounts.read.1.17.4.1763396038123456789.0.rnd",
])  # fmt: skip


MESSAGES = st.builds(
    lambda lines, items, subject, reply: message(
        b"\n".join(lines), b"".join(item + b"\r\n" for item in items), subject, reply
    ),
    st.lists(LINES, min_size=1, max_size=3),
    st.one_of(ORDERED, st.lists(ITEMS, max_size=5)),
    SUBJECTS,
    REPLIES,
)


@settings(max_examples=500, deadline=None)
@given(MESSAGES)
def test_any_message_is_read_the_same_or_left_alone(raw: RawMessage) -> None:
    found = usual(raw)
    if found is not None:
        assert repr(found) == repr(exactly(raw))


NUMBERED = st.builds(
    lambda number, subject, line: message(
        line,
        b"Nats-Msg-Id: x%d\r\nMill-Versions: %d-%d\r\n" % (number, number, number),
        b"accounts." + subject,
        b"$JS.ACK.MILL_accounts.read.1.%d.4.1763396038123456789.0" % number,
    ),
    st.integers(1, 99),
    st.sampled_from([b"a1", b"a.b", b"ab"]),
    st.sampled_from([b'{"Deposited":{"amount":5}}', b'{"Rated":{"rate":0.5}}']),
)
# What could be taken for the border between two messages.
BORDERS = st.sampled_from([
    message(b'{"Rated":{"rate":1}}\n', USUAL), message(b'\n{"Rated":{"rate":1}}', USUAL),
    message(b'{"Rated":{"rate":1}}', USUAL + b"\r\n\0NATS/1.0\r\n" + USUAL),
    message(b'{"Rated":{"rate":1}}', USUAL + b"\r\nNATS/1.0\r\n" + USUAL),
    message(b'{"Rated":{"rate":1}}', USUAL, b"others.a1"), message(b"", b""),
    message(b'{"Rated":{"rate":1}}', USUAL, reply=REPLY.replace(b".1.17", b".2.17")),
    message(b'{"Rated":{"rate":1}}', USUAL, reply=b"$JS.ACK.MILL_accounts.read.1.17.4"),
    RawMessage(b"accounts.a1", REPLY, b"", b'{"Rated":{"rate":1}}'),
])  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(st.one_of(NUMBERED, NUMBERED, NUMBERED, BORDERS, MESSAGES), max_size=12))
def test_messages_are_read_together_as_each_on_its_own(raws: list[RawMessage]) -> None:
    assert repr(usual_events(PARTITION, raws, TYPES)) == repr([usual(raw) for raw in raws])


LINE = b'{"Rated":{"rate":1}}'


@pytest.mark.parametrize(
    "subject",
    [
        b"accounts._",
        b"accounts._x.y",
        b"accounts.",
        b"accounts",
        b"elsewhere.a1",
        b"accounts.a=20b",
    ],
)
def test_a_subject_that_is_no_plain_id_is_left_alone(subject: bytes) -> None:
    good, other = message(LINE, USUAL), message(LINE, USUAL, subject)
    assert usual(other) is None
    found = usual_events(PARTITION, [good, other, good], TYPES)
    assert found == [usual(good), None, usual(good)]
    assert found[0] is not None


def test_headers_that_look_like_those_of_another_message_are_left_alone() -> None:
    """Blocks are searched together: none may be taken for a part of its neighbour."""
    good, none = message(LINE, USUAL), message(LINE, b"own: x\r\n")
    for headers in (
        USUAL + b"\r\n\0NATS/1.0\r\n" + USUAL,
        b"own: NATS/1.0\r\n" + USUAL,
        b"own: \0NATS/1.0\r\n" + USUAL,
    ):
        double = message(LINE, headers)
        for raws in ([double], [double, none], [none, double], [double, none, good]):
            found = usual_events(PARTITION, raws, TYPES)
            assert found == [usual(good) if raw is good else None for raw in raws]
