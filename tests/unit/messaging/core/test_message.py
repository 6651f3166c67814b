"""Messages without a broker: what is read lazily, what is refused, what goes on the wire."""

from __future__ import annotations

import pytest

from millstream.errors import ConfigError
from millstream.messaging.core.message import Message, body_of, subject_bytes
from millstream.settings import ConnectionSettings
from millstream.wire.aio.connection import Connection
from millstream.wire.protocol import parse_header_items


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The frames a connection would send."""
    frames: list[bytes] = []
    monkeypatch.setattr(Connection, "send", lambda _, frame: frames.append(frame))
    return frames


def message(reply: bytes = b"", headers: bytes = b"", data: bytes = b"") -> Message:
    return Message(Connection(ConnectionSettings()), b"a.b", reply, headers, data)


def test_fields_are_text_where_people_read_them() -> None:
    found = message(b"back", b"NATS/1.0\r\nA: 1\r\nA: 2\r\n\r\n", "grün".encode())
    assert (found.subject, found.reply, found.text) == ("a.b", "back", "grün")
    assert found.headers == {"A": "1"}
    assert found.header_items == [("A", "1"), ("A", "2")]
    assert found.size == 5 + 24
    assert repr(found) == "Message('a.b', 5 bytes, reply='back')"


def test_a_bare_message_has_no_reply_and_no_headers() -> None:
    found = message()
    assert (found.reply, dict(found.headers), found.header_items) == (None, {}, [])
    assert found.service_error is None


def test_headers_cannot_be_changed_by_a_reader() -> None:
    with pytest.raises(TypeError):
        message().headers["A"] = "1"  # type: ignore[index]


def test_an_answer_goes_to_the_reply_subject(sent: list[bytes]) -> None:
    message(b"back").respond("ok")
    message(b"back").respond(b"ok", {"A": "1"})
    assert sent == [
        b"PUB back 2\r\nok\r\n",
        b"HPUB back 18 20\r\nNATS/1.0\r\nA: 1\r\n\r\nok\r\n",
    ]


def test_an_error_answer_fits_on_one_header_line(sent: list[bytes]) -> None:
    message(b"back").respond_error(400, "two\r\nlines: injected")
    (frame,) = sent
    assert b"Nats-Service-Error: two lines: injected\r\n" in frame
    assert b"Nats-Service-Error-Code: 400\r\n" in frame


@pytest.mark.parametrize(
    ("block", "code", "description"),
    [
        (b"NATS/1.0\r\nNats-Service-Error: no\r\nNats-Service-Error-Code: 7\r\n\r\n", "7", "no"),
        (b"NATS/1.0\r\nNats-Service-Error-Code: 7\r\n\r\n", "7", ""),
        (b"NATS/1.0\r\nNats-Service-Error: no\r\n\r\n", "", "no"),
    ],
)
def test_a_service_error_is_recognised(block: bytes, code: str, description: str) -> None:
    error = message(headers=block).service_error
    assert error is not None
    assert (error.code, error.description) == (code, description)


def test_a_header_that_only_starts_like_an_error_is_none() -> None:
    assert message(headers=b"NATS/1.0\r\nNats-Service-Errors: 2\r\n\r\n").service_error is None


@pytest.mark.parametrize("subject", ["a", "a.b", "$SRV.PING", "a*b.c>d", "grün.1"])
def test_a_plain_subject_is_taken(subject: str) -> None:
    assert subject_bytes(subject) == subject.encode()


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a b", "a\tb", "a\n", "*", "a.>"])
def test_a_subject_that_would_break_the_line_or_match_many_is_refused(subject: str) -> None:
    with pytest.raises(ConfigError, match="subject"):
        subject_bytes(subject)


def test_payloads_are_bytes_text_or_json() -> None:
    assert body_of("ä", None) == ("ä".encode(), b"")
    assert body_of(b"x", {}) == (b"x", b"")
    assert body_of([1, "ä"], None) == (
        '[1,"ä"]'.encode(),
        b"NATS/1.0\r\ncontent-type: application/json\r\n\r\n",
    )
    block = body_of({"a": 1}, [("Content-Type", "x"), ("a", "1"), ("a", "2")])[1]
    assert parse_header_items(block) == [("Content-Type", "x"), ("a", "1"), ("a", "2")]
    with pytest.raises(ConfigError, match="a dict or a list, found int"):
        body_of(42, None)  # type: ignore[arg-type]
