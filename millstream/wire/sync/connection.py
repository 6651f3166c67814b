"""The blocking client: one socket, plain calls; for Spark workers, scripts and threads.

It never has more bytes under way than it reads in one go, so the server never finds it slow. No
cleanup is needed: a worker may be killed at any line.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import msgspec

from millstream.closing import Closing
from millstream.deadline import Deadline
from millstream.errors import (
    ApiError,
    AuthenticationFailed,
    ConnectError,
    ConnectionClosed,
    NoResponders,
    PayloadTooLarge,
    PermissionDenied,
    RequestTimeout,
    TlsFailed,
)
from millstream.settings import ConnectionSettings
from millstream.wire.api import RETRY, Refusal, api_prefix, error_from
from millstream.wire.handshake import (
    ServerAddress,
    ServerInfo,
    connect_line,
    denied_subject,
    is_authentication_error,
    parse_address,
    parse_info,
)
from millstream.wire.protocol import (
    PING,
    PONG,
    Handler,
    Parser,
    encode_subject,
    hpub,
    pub,
    status_of,
    sub,
    unique_token,
    unsub,
)
from millstream.wire.tls import check_tls, no_answer, open_failure, tls_context, worst_of

__all__ = ["BlockingConnection", "BlockingJetStream"]

T = TypeVar("T")
# Called with bytes that arrived, and with what parses those that it has no use for.
Divert = Callable[[bytes, Callable[[bytes], None]], None]

RECEIVE_BYTES: Final = 1024 * 1024
ATTEMPT_SECONDS: Final = 2.0
PAUSE_SECONDS: Final = 0.1
# Questions that are sent together; with many more the server's API queue could fill up.
TOGETHER_MAX: Final = 16


class _Lost(ConnectError):
    """The socket is gone; the next call opens another."""


class BlockingConnection(Closing):
    """A NATS connection of one thread; when it is lost, the next call opens it again."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings
        self._addresses = [parse_address(url) for url in settings.urls]
        self._address = self._addresses[0]  # the last one tried
        self._socket: socket.socket | None = None
        self._handlers: dict[bytes, Handler] = {}
        self._parser = Parser(self._handlers, self._control)
        self._sid = 0
        self._token = 0
        self._pongs = 0
        self._error: Exception | None = None
        self._denied: PermissionDenied | None = None
        self._closed = False
        self._divert: Divert | None = None
        self.info = ServerInfo()
        self.url = settings.urls[0]
        self.generation = 0  # grows with every new socket: subscriptions of an older one are gone

    def _enter(self) -> None:
        self.open(Deadline(self.settings.connect_timeout))

    def _leave(self, error: BaseException | None) -> None:
        self.close()

    # -- life -----------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def open(self, deadline: Deadline) -> None:
        """Connect to the first server that answers; nothing happens when connected."""
        if self._closed:
            raise ConnectionClosed("the connection was closed")
        if self._socket is not None:
            return
        errors: list[ConnectError] = []
        for address in self._addresses:
            left = deadline.left()
            last = address is self._addresses[-1]
            try:
                self._open_one(address, Deadline(left if last else min(left, max(0.5, left / 2))))
                return
            except (ConnectError, OSError) as error:
                self._drop()
                errors.append(open_failure(error, address, self.settings.tls, self.info))
            except BaseException:
                self._drop()  # interrupted: the next call must not take it for a connection
                raise
        raise worst_of(errors)

    def close(self) -> None:
        self._closed = True
        self._drop()

    def lose(self) -> None:
        """Give the socket up, so that the next call opens another."""
        self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _open_one(self, address: ServerAddress, deadline: Deadline) -> None:
        self._handlers.clear()
        self._parser = Parser(self._handlers, self._control)
        self._error, self._denied, self._pongs = None, None, 0
        self.generation += 1
        self.info = ServerInfo()
        self._address = address
        plain = socket.create_connection((address.host, address.port), deadline.left() or 0.001)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = plain
        tls = self.settings.tls
        wants_tls = address.tls or tls is not None
        if tls is not None and tls.handshake_first:
            self._socket = self._secure(plain, address.host, deadline)
        # The greeting decides how to log in.
        if not self.wait(lambda: bool(self.info.server_id), deadline):
            raise no_answer(address, tls, self.info, deadline.seconds)
        if not isinstance(self._socket, ssl.SSLSocket) and (wants_tls or self.info.tls_required):
            check_tls(address, tls, self.info)
            self._socket = self._secure(plain, address.host, deadline)
        self.send(connect_line(self.info, self.settings, address) + PING)
        if not self.wait(lambda: self._pongs > 0, deadline):
            raise no_answer(address, tls, self.info, deadline.seconds)
        self.url = str(address)

    def _secure(self, plain: socket.socket, host: str, deadline: Deadline) -> ssl.SSLSocket:
        plain.settimeout(deadline.left() or 0.001)
        return tls_context(self.settings.tls).wrap_socket(plain, server_hostname=host)

    # -- bytes ----------------------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> None:
        """Write bytes; raises ConnectError when the socket is gone."""
        if self._socket is None:
            raise _Lost(f"not connected to {self.url}")
        try:
            self._socket.settimeout(self.settings.request_timeout)
            self._socket.sendall(data)
        except OSError as error:
            self._drop()
            raise _Lost(f"the connection to {self.url} was lost: {error}") from error

    def wait(self, until: Callable[[], bool], deadline: Deadline) -> bool:
        """Handle what arrives until the condition holds (True) or the time is up (False)."""
        while not until():
            if deadline.passed:
                return False
            self.receive(deadline)
        return True

    def receive(self, deadline: Deadline) -> bool:
        """Handle the next bytes that arrive; False when the time is up first."""
        if self._socket is None:
            raise _Lost(f"not connected to {self.url}")
        try:
            self._socket.settimeout(max(0.001, deadline.left()))
            data = self._socket.recv(RECEIVE_BYTES)
        except TimeoutError:
            return False
        except OSError as error:
            self._drop()
            raise _Lost(f"the connection to {self.url} was lost: {error}") from error
        if not data:
            self._drop()
            raise self._error or _Lost(f"{self.url} closed the connection")
        if self._divert is None:
            self._parser.feed(data)
        else:
            self._divert(data, self._parser.feed)
        if self._error is not None:
            self._drop()
            raise self._error
        return True

    @contextmanager
    def diverted(self, divert: Divert) -> Iterator[Callable[[bytes], None]]:
        """Inside, bytes that arrive go to `divert` first, and what it passes on is parsed.

        Gives what takes back the bytes of a frame that is not complete.
        """
        rest = self._parser.take()
        self._divert = divert
        try:
            if rest:
                divert(rest, self._parser.feed)
            yield self._parser.feed
        finally:
            self._divert = None

    def _control(self, op: bytes, rest: bytes) -> None:
        if op == b"PING":
            self.send(PONG)
        elif op == b"PONG":
            self._pongs += 1
        elif op == b"INFO":
            self.info = parse_info(rest)
        elif op == b"-ERR":
            text = rest.decode("utf-8", "replace").strip().strip("'")
            self._denied = denied_subject(text, self.settings, self._address)
            if is_authentication_error(text):
                self._error = AuthenticationFailed(f"the server refused the credentials: {text}")
            elif self._denied is None:
                self._error = _Lost(f"{self.url} says: {text}")

    # -- subscriptions and requests -------------------------------------------------------

    def subscribe(self, subject: str, handler: Handler) -> bytes:
        """Subscribe on the present socket; the id to unsubscribe with."""
        self._sid += 1
        sid = b"%d" % self._sid
        self._handlers[sid] = handler
        self.send(sub(encode_subject(subject), b"", sid))
        return sid

    def unsubscribe(self, sid: bytes) -> None:
        if self._handlers.pop(sid, None) is not None and self._socket is not None:
            self.send(unsub(sid))

    def new_inbox(self) -> str:
        return f"{self.settings.inbox_prefix}.{unique_token()}"

    def check_size(self, size: int) -> None:
        if size > self.info.max_payload:
            raise PayloadTooLarge(size, self.info.max_payload)

    def request(
        self, subject: str, payload: bytes = b"", headers: bytes = b"", timeout: float | None = None
    ) -> tuple[bytes, bytes]:
        """Header block and payload of the first answer."""
        return self.request_all([(subject, payload)], headers, timeout)[0]

    def request_all(
        self,
        requests: Sequence[tuple[str, bytes]],
        headers: bytes = b"",
        timeout: float | None = None,
    ) -> list[tuple[bytes, bytes]]:
        """The first answer to each of several requests (subject, payload), sent together."""
        deadline = Deadline(self.settings.request_timeout if timeout is None else timeout)
        self.open(deadline)
        inbox = self.new_inbox()
        replies = [f"{inbox}.{number}".encode() for number in range(len(requests))]
        frames = []
        for (subject, payload), reply in zip(requests, replies, strict=True):
            self.check_size(len(headers) + len(payload))
            to = encode_subject(subject)
            frames.append(hpub(to, reply, headers, payload) if headers else pub(to, reply, payload))
        answers: dict[bytes, tuple[bytes, bytes]] = {}

        def answered(reply: bytes, _: bytes, block: bytes, body: bytes) -> None:
            answers.setdefault(reply, (block, body))

        sid = self.subscribe(f"{inbox}.*", answered)
        try:
            self.send(b"".join(frames))
            self._denied = None
            complete = self.wait(
                lambda: len(answers) == len(requests) or self._denied is not None, deadline
            )
        finally:
            if self._socket is not None:
                self.unsubscribe(sid)
        for (subject, _), reply in zip(requests, replies, strict=True):
            if reply not in answers:
                denied = self._denied if complete else None
                raise denied or RequestTimeout(subject, deadline.seconds)
            block, body = answers[reply]
            if not body and status_of(block)[0] == 503:
                raise NoResponders(subject)
        return [answers[reply] for reply in replies]


class _Answer(msgspec.Struct):
    error: Refusal | None = None


class BlockingJetStream:
    """The JetStream API over a blocking connection; every call is repeated until it is answered."""

    def __init__(self, connection: BlockingConnection, domain: str | None = None) -> None:
        self.connection = connection
        self.prefix = api_prefix(domain or connection.settings.domain)

    def call(
        self,
        verb: str,
        body: object,
        into: type[T],
        timeout: float | None = None,
        attempt: float = ATTEMPT_SECONDS,
    ) -> T:
        """Ask and give the typed answer; a refusal is raised as an ApiError.

        An attempt that is not answered within `attempt` seconds is repeated.
        """
        (answer,) = self.ask_all([(verb, body)], timeout, attempt)
        if isinstance(answer, ApiError):
            raise answer
        return msgspec.json.decode(answer, type=into)

    def ask(self, verb: str, body: object = None, timeout: float | None = None) -> bytes:
        """The answer to one question; a refusal is raised as an ApiError."""
        (answer,) = self.ask_all([(verb, body)], timeout)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    def ask_all(
        self,
        questions: Sequence[tuple[str, object]],
        timeout: float | None = None,
        attempt: float = ATTEMPT_SECONDS,
    ) -> list[bytes | ApiError]:
        """The answers to several questions (verb, body); a refusal is returned as an ApiError.

        They are sent together, so that all of them take one round trip. `timeout` is for all.
        """
        seconds = self.connection.settings.request_timeout if timeout is None else timeout
        deadline = Deadline(seconds)
        requests = [
            (f"{self.prefix}.{verb}", b"" if body is None else msgspec.json.encode(body))
            for verb, body in questions
        ]
        answers: list[bytes | ApiError] = []
        for first in range(0, len(requests), TOGETHER_MAX):
            answers += self._ask_together(requests[first : first + TOGETHER_MAX], deadline, attempt)
        return answers

    def _ask_together(
        self, requests: list[tuple[str, bytes]], deadline: Deadline, attempt: float
    ) -> list[bytes | ApiError]:
        while True:
            error: Exception | None = None
            answers: list[bytes | ApiError] = []
            try:
                seconds = max(0.05, deadline.left(at_most=attempt))
                replies = self.connection.request_all(requests, b"", seconds)
                for (subject, _), (_, answer) in zip(requests, replies, strict=True):
                    refusal = msgspec.json.decode(answer, type=_Answer).error
                    verb = subject.removeprefix(f"{self.prefix}.")
                    answers.append(answer if refusal is None else error_from(refusal, verb))
            except (AuthenticationFailed, TlsFailed):
                raise  # asking again would not help
            except (RequestTimeout, NoResponders, ConnectError) as failed:
                error = failed
            retry = any(isinstance(a, ApiError) and a.err_code in RETRY for a in answers)
            if error is None and (not retry or deadline.passed):
                return answers
            if error is not None and deadline.passed:
                raise error
            time.sleep(deadline.left(at_most=PAUSE_SECONDS))
