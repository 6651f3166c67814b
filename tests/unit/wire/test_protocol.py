"""The frame parser and header blocks: any bytes, in any pieces."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError
from millstream.wire.protocol import (
    CONTROL_LINE_BYTES_MAX,
    FRAME_BYTES_MAX,
    Parser,
    ProtocolError,
    encode_headers,
    hpub,
    parse_header_items,
    parse_headers,
    pub,
    status_of,
    sub,
    unique_token,
    unsub,
)

Frame = tuple[bytes, tuple[Any, ...]]  # bytes on the wire, what the parser makes of them

words = st.text("abc_$.*", min_size=1, max_size=8).map(str.encode)
# Payloads that look like frames must not be taken for them.
payloads = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"\r\n", b"MSG a 1 3\r\nabc\r\n", b"PING\r\n", b"\r", b"\n\r\n"]),
)
names = st.text("ABCabc-", min_size=1, max_size=6)
values = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x0b\x0c\x1c\x1d\x1e\x85"))


def message(subject: bytes, reply: bytes, block: bytes, payload: bytes, known: bool) -> Frame:
    sid = b"7" if known else b"8"
    back = b" " + reply if reply else b""
    if block:
        sizes = b"%d %d" % (len(block), len(block) + len(payload))
        wire = b"HMSG %b %b%b %b\r\n%b%b\r\n" % (subject, sid, back, sizes, block, payload)
    else:
        wire = b"MSG %b %b%b %d\r\n%b\r\n" % (subject, sid, back, len(payload), payload)
    return wire, ("message", subject, reply, block, payload) if known else ()


def control(line: bytes) -> Frame:
    op, _, rest = line.partition(b" ")
    return line + b"\r\n", ("control", op, rest)


blocks = st.one_of(
    st.just(b""),
    st.just(b"NATS/1.0 503\r\n\r\n"),
    st.lists(st.tuples(names, values), min_size=1, max_size=3).map(encode_headers),
)
frames = st.one_of(
    st.builds(message, words, st.one_of(st.just(b""), words), blocks, payloads, st.booleans()),
    st.sampled_from([b"PING", b"PONG", b"+OK", b"-ERR 'Stale Connection'", b'INFO {"a":1}']).map(
        control
    ),
)


def parsed(pieces: Iterator[bytes] | list[bytes]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    parser = Parser(
        {b"7": lambda *args: found.append(("message", *args))},
        lambda op, rest: found.append(("control", op, rest)),
    )
    for piece in pieces:
        parser.feed(piece)
    return found


@given(st.lists(frames, max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_any_frames_in_any_pieces_give_the_same_messages(
    sent: list[Frame], cuts: list[int]
) -> None:
    wire = b"".join(data for data, _ in sent)
    expected = [meaning for _, meaning in sent if meaning]
    places = sorted({min(cut, len(wire)) for cut in cuts} | {0, len(wire)})
    pieces = [wire[a:b] for a, b in pairwise(places)]
    assert parsed(pieces) == expected


@given(st.lists(frames, max_size=4))
def test_frames_byte_by_byte_give_the_same_messages(sent: list[Frame]) -> None:
    wire = b"".join(data for data, _ in sent)
    assert parsed([wire[n : n + 1] for n in range(len(wire))]) == parsed([wire])


def parsed_in_runs(pieces: list[bytes]) -> list[tuple[Any, ...]]:
    """What `parsed` gives, by a handler that takes runs."""
    found: list[tuple[Any, ...]] = []

    def take(run: list[tuple[bytes, bytes, bytes, bytes]]) -> None:
        assert run
        found.extend(("message", *frame) for frame in run)

    parser = Parser({}, lambda op, rest: found.append(("control", op, rest)), {b"7": take})
    for piece in pieces:
        parser.feed(piece)
    return found


@given(st.lists(frames, max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_runs_hold_the_same_messages_in_the_same_order(sent: list[Frame], cuts: list[int]) -> None:
    wire = b"".join(data for data, _ in sent)
    places = sorted({min(cut, len(wire)) for cut in cuts} | {0, len(wire)})
    pieces = [wire[a:b] for a, b in pairwise(places)]
    assert parsed_in_runs(pieces) == [meaning for _, meaning in sent if meaning]


def test_neighbours_are_one_run_and_order_is_kept_across_subscriptions() -> None:
    found: list[Any] = []
    runs: dict[bytes, Any] = {
        b"1": lambda run: found.append(("one", [frame[3] for frame in run])),
        b"2": lambda run: found.append(("two", [frame[3] for frame in run])),
    }
    handlers: dict[bytes, Any] = {b"3": lambda *frame: found.append(("three", frame[3]))}
    parser = Parser(handlers, lambda op, _rest: found.append(op), runs)
    order = [b"1", b"1", b"2", b"2", b"3", b"1", b"PING", b"1", b"9", b"1"]
    wire = [
        b"PING\r\n" if sid == b"PING" else b"MSG a %b 1\r\n%d\r\n" % (sid, place)
        for place, sid in enumerate(order)
    ]
    parser.feed(b"".join(wire))
    assert found == [
        ("one", [b"0", b"1"]),
        ("two", [b"2", b"3"]),
        ("three", b"4"),
        ("one", [b"5"]),
        b"PING",
        ("one", [b"7"]),
        ("one", [b"9"]),
    ]


def test_what_came_before_a_broken_frame_is_handed_over() -> None:
    found: list[Any] = []
    parser = Parser({}, lambda *_: None, {b"7": found.extend})
    with pytest.raises(ProtocolError):
        parser.feed(b"MSG a 7 1\r\nx\r\nMSG a 7 what\r\n")
    assert found == [(b"a", b"", b"", b"x")]


def test_a_run_whose_handler_fails_is_not_handed_over_twice() -> None:
    calls: list[int] = []

    def fail(run: list[Any]) -> None:
        calls.append(len(run))
        raise ValueError

    with pytest.raises(ValueError):
        Parser({}, lambda *_: None, {b"7": fail}).feed(b"MSG a 7 1\r\nx\r\nPING\r\n")
    assert calls == [1]


def test_a_message_is_handed_out_as_soon_as_it_is_complete() -> None:
    wire, meaning = message(b"a", b"", b"", b"xyz", known=True)
    assert parsed([wire[:-1]]) == []
    assert parsed([wire[:-1], wire[-1:] + b"MSG a 7 5\r\nxy"]) == [meaning]


def test_a_subscription_that_ends_in_its_own_handler_gets_nothing_more() -> None:
    found: list[bytes] = []
    handlers: dict[bytes, Any] = {}

    def handle(_subject: bytes, _reply: bytes, _headers: bytes, payload: bytes) -> None:
        found.append(payload)
        del handlers[b"7"]

    handlers[b"7"] = handle
    Parser(handlers, lambda *_: None).feed(b"MSG a 7 1\r\nx\r\nMSG a 7 1\r\ny\r\n")
    assert found == [b"x"]


def test_a_frame_beyond_every_limit_ends_the_connection() -> None:
    with pytest.raises(ProtocolError):
        parsed([b"MSG a 7 %d\r\n" % (FRAME_BYTES_MAX + 1)])
    with pytest.raises(ProtocolError):
        parsed([b"INFO " + b"x" * CONTROL_LINE_BYTES_MAX, b"y" * 10])


@pytest.mark.parametrize(
    "line",
    [
        *(
            b"MSG a 7 x",
            b"MSG a 7",
            b"HMSG a 7 5",
            b"HMSG a 7 5 3",
            b"MSG a 7 -5",
            b"HMSG a 7 -1 4",
        ),
        *(b"MSG a 7 r 5 5", b"MSGS a 7 5", b"HMSG a 7 r 5 3", b"MSG a 7 " + b"9" * 5000),
    ],
)
def test_a_broken_frame_is_an_error_of_the_connection_and_not_silence(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        parsed([line + b"\r\nabcdef\r\n"])


@given(st.lists(st.tuples(names, values), min_size=1, max_size=6))
def test_headers_come_back_as_they_were_written(items: list[tuple[str, str]]) -> None:
    block = encode_headers(items)
    assert parse_header_items(block) == [(name, value.strip(" \t")) for name, value in items]
    firsts: dict[str, str] = {}
    for name, value in items:
        firsts.setdefault(name, value.strip(" \t"))
    assert parse_headers(block) == firsts


def test_header_values_that_are_no_text_survive() -> None:
    block = b"NATS/1.0\r\na: \xff\xfe\r\n\r\n"
    assert encode_headers(parse_header_items(block)) == block


def test_no_headers_are_no_block() -> None:
    assert encode_headers({}) == b""
    assert parse_headers(b"") == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("", "v"), ("a b", "v"), ("a:b", "v"), ("ä", "v"), ("a\r", "v"), ("a", "v\r\nb: c"), ("a", 1)],
)
def test_headers_that_would_break_the_block_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError):
        encode_headers([(name, value)])


@pytest.mark.parametrize(
    ("block", "status"),
    [
        (b"NATS/1.0 503\r\n\r\n", (503, "")),
        (b"NATS/1.0 409 Consumer Deleted\r\nA: b\r\n\r\n", (409, "Consumer Deleted")),
        (b"NATS/1.0\r\nA: b\r\n\r\n", (0, "")),
        (b"", (0, "")),
        (b"NATS/1.0 abc\r\n\r\n", (0, "")),
    ],
)
def test_the_status_is_in_the_first_line(block: bytes, status: tuple[int, str]) -> None:
    assert status_of(block) == status


def test_frames_to_the_server_are_as_the_protocol_says() -> None:
    assert pub(b"a", b"", b"xyz") == b"PUB a 3\r\nxyz\r\n"
    assert pub(b"a", b"r", b"") == b"PUB a r 0\r\n\r\n"
    block = encode_headers({"A": "b"})
    assert hpub(b"a", b"", block, b"xyz") == b"HPUB a 18 21\r\n" + block + b"xyz\r\n"
    assert hpub(b"a", b"r", block, b"") == b"HPUB a r 18 18\r\n" + block + b"\r\n"
    assert sub(b"a.>", b"", b"1") == b"SUB a.> 1\r\n"
    assert sub(b"a", b"q", b"1") == b"SUB a q 1\r\n"
    assert (unsub(b"1"), unsub(b"1", 5)) == (b"UNSUB 1\r\n", b"UNSUB 1 5\r\n")


def test_tokens_are_valid_in_subjects_and_never_collide() -> None:
    tokens = {unique_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(len(token) == 22 and token.isalnum() for token in tokens)
