"""Positions, times, formats, bodies and rows of the command line: pure, without a broker."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.cli import session
from millstream.cli.files.events import FileColumns
from millstream.cli.files.formats import FileProgress, file_format
from millstream.cli.options import bodies, positions, times
from millstream.cli.options import topic as topic_options
from millstream.cli.views.event_text import event_record, formatter, json_line, shown, value_field
from millstream.cli.views.stdout_writer import StdoutWriter
from millstream.cli.views.trace import draw
from millstream.errors import ConfigError
from millstream.events.event import Partition, PlainEvent
from millstream.messaging import NewEvent, Start
from millstream.wire.message import RawMessage

INT64 = 2**63 - 1


def event(
    data: bytes = b"value", key: bytes = b"k", headers: str = "", time: int = 1_500_000_000
) -> PlainEvent:
    reply = f"$JS.ACK.orders.c.1.17.1.{time}.0".encode()
    block = f"NATS/1.0\r\nNats-Msg-Id: one\r\n{headers}\r\n".encode()
    return PlainEvent(
        Partition("orders-3", "orders", 3, "orders.3"),
        RawMessage(b"orders.3." + key, reply, block, data),
    )


# -- positions and times ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "last", "start"),
    [
        ("beginning", 9, Start.ALL),
        ("start", 9, Start.ALL),
        ("end", 9, Start.at_offset(10)),
        ("end", 0, Start.at_offset(1)),
        ("-3", 9, Start.at_offset(7)),
        ("-30", 9, Start.at_offset(1)),
        ("5", 9, Start.at_offset(5)),
        ("keys", 9, Start.LAST_PER_KEY),
        ("@2026-01-31T12:00+01:00", 9, Start.at_time(datetime(2026, 1, 31, 11, tzinfo=UTC))),
    ],
)
def test_a_position_is_where_reading_starts(text: str, last: int, start: Start) -> None:
    assert positions.parse_position(text).start(last) == start


@pytest.mark.parametrize("text", ["", "0", "soon", "@", "@yesterday", "@5", "--5", "@2026-01-31"])
def test_an_invalid_position_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        positions.parse_position(text)


def test_a_duration_is_before_now() -> None:
    then = times.moment("10m")
    assert timedelta(minutes=10) <= datetime.now(UTC) - then < timedelta(minutes=11)


@given(st.integers(-INT64, INT64))
def test_a_time_is_written_so_that_it_can_be_read_again(nanoseconds: int) -> None:
    assert times.nanoseconds(times.time_text(nanoseconds)) == nanoseconds


# -- events as text -----------------------------------------------------------------------


def test_a_format_has_every_field_and_escape() -> None:
    write = formatter(r"%t %p %o %k %K %s %S %T %h %i %%\t\x41\n", raw=False, as_json=False)
    line = write(event(headers="A: 1\r\nB: 2\r\n"))
    assert line == b"orders 3 17 k 1 value 5 1500 A=1,B=2 one %\tA\n"


@pytest.mark.parametrize("form", ["%q", r"\q", "%s%!"])
def test_a_format_with_an_unknown_field_is_refused(form: str) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        formatter(form, raw=False, as_json=False)


def test_bytes_that_are_not_text_are_in_another_field() -> None:
    record = event_record(event(b"\xff", key=b"=FF", headers="H: \xe9\r\n"))
    assert record["key_base64"] == "/w=="
    assert record["value_base64"] == "/w=="
    assert "key" not in record
    assert "value" not in record
    assert json_line(record).endswith(b"\n")


@pytest.mark.parametrize(
    ("value", "form", "field"),
    [
        (b"a", "auto", {"value": "a"}),
        (b"a", "base64", {"value_base64": "YQ=="}),
        (b"[1]", "json", {"value": [1]}),
        (None, "auto", {"value": None}),
        ({"typed": 1}, "text", {"value": {"typed": 1}}),
    ],
)
def test_a_value_is_written_in_the_requested_form(
    value: Any, form: str, field: dict[str, Any]
) -> None:
    assert value_field(value, form) == field


@pytest.mark.parametrize(("value", "form"), [(b"\xff", "text"), (b"{", "json")])
def test_a_value_that_does_not_fit_the_form_is_refused(value: bytes, form: str) -> None:
    with pytest.raises(ConfigError, match="--value auto"):
        value_field(value, form)


@given(st.binary())
def test_shown_bytes_never_break_or_repaint_a_line(data: bytes) -> None:
    text = shown(data).decode()
    assert text.isprintable()


# -- bodies and headers -------------------------------------------------------------------


def test_a_header_needs_a_name_and_a_colon() -> None:
    assert bodies.header_pairs(["A: b: c", "X:"]) == [("A", "b: c"), ("X", "")]
    for wrong in ("no colon", ": value"):
        with pytest.raises(ConfigError, match="not a header"):
            bodies.header_pairs([wrong])


def test_lines_of_a_pipe_keep_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    whole = b"x" * (bodies.CHUNK_BYTES * 2)
    with os.fdopen(reading, "r") as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        lines = bodies.stdin_lines()
        os.write(writing, b"one\r\ntwo\n\nhalf")
        assert next(lines) == [b"one", b"two", b""]  # immediately, without waiting for the rest

        def send() -> None:
            os.write(writing, whole)
            os.close(writing)

        sender = threading.Thread(target=send)
        sender.start()
        assert list(lines) == [[b"half" + whole]]
        sender.join()


def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LINE_BYTES_MAX", 1000)
    reading, writing = os.pipe()
    os.write(writing, b"x" * 2000)
    os.close(writing)
    with os.fdopen(reading, "r") as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        with pytest.raises(ConfigError, match="a line has over"):
            list(bodies.stdin_lines())


# -- options ------------------------------------------------------------------------------


def test_only_given_options_become_settings() -> None:
    limits = {"max_age": "7d", "max_messages": "none", "history": "3"}
    options: dict[str, Any] = {**limits, "replicas": None, "sources": []}
    assert topic_options.settings_from(options) == {
        "max_age": "7d", "max_messages": None, "history": 3,
    }  # fmt: skip


def test_a_file_without_a_known_ending_needs_a_format() -> None:
    assert file_format("-", None) == "jsonl"
    for name, form in (("a.txt", None), ("a.csv", "xml"), ("-", "parquet"), ("a.parquet.gz", None)):
        with pytest.raises(ConfigError):
            file_format(name, form)


@pytest.mark.parametrize("present", [True, False])
def test_a_file_with_a_column_value_is_an_envelope(present: bool) -> None:
    row = {"value": "x", "key": "k", "a": 1} if present else {"key": "k", "a": 1}
    made = FileColumns().settled(row).event((1, row, None))
    whole = NewEvent(b'{"key":"k","a":1}', None)
    assert made == (NewEvent(b"x", "k") if present else whole)
    assert FileColumns(whole=True).settled(row).whole


# -- output -------------------------------------------------------------------------------


def test_no_question_is_asked_without_a_terminal() -> None:
    session.confirm("Really?", yes=True)
    with pytest.raises(ConfigError, match="--yes"):
        session.confirm("Really?", yes=False)


async def test_lines_are_written_in_order_immediately_and_at_the_end(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    async with StdoutWriter() as out:
        await out.write(b"one\n")
        shown = b""
        for _ in range(3000):
            shown += capfdbinary.readouterr().out
            if shown:
                break
            await asyncio.sleep(0.01)
        assert shown == b"one\n"
        large = b"x" * 100_000 + b"\n"
        await out.write(large)
        await out.write(b"end\n")
    assert capfdbinary.readouterr().out == large + b"end\n"


def test_a_progress_bar_is_only_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    with FileProgress("Importing", 10) as progress:
        progress.show(5, 5)
    assert capsys.readouterr().err == ""


def test_a_trace_shows_mappings_imports_errors_and_hops(capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        {"type": "in", "kind": 0, "cid": 7, "acc": "A", "subj": "x"},
        {"type": "sm", "to": "y"},
        {"type": "se", "acc": "B", "to": "z"},
        {"type": "si", "acc": "C", "from": "p", "to": "q"},
        {"type": "js", "stream": "S", "subject": "x", "nointerest": True},
        {"type": "eg", "kind": 4, "cid": 8, "name": "leaf", "hop": "1", "error": "no room"},
        {"type": "new", "kind": 9},
    ]
    first = {"server": {"name": "one", "cluster": "C1"}, "events": events}
    second = {
        "server": {"name": "two"},
        "request": {"header": {"Nats-Trace-Hop": ["1"]}},
        "events": [{"type": "in", "kind": 4, "name": "one", "acc": "A", "subj": "x"}],
    }
    draw("x", [second, first], dry=True)
    out = capsys.readouterr().out
    for words in (
        "server one, cluster C1", "from client 7, account A", "mapped to y", "account B as z",
        "p becomes q", "no subscription wants it", "to leaf node 'leaf': REFUSED, no room",
        "server two", "no subscriber and no topic",
    ):  # fmt: skip
        assert words in out
    assert out.index("server one") < out.index("server two")
