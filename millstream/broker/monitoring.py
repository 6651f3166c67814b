"""Asks a server about itself: over its monitoring port, or as the user of its system account.

The monitoring port asks for no password, so a broker with users has none; the system account
gives the same answers. The keeper runs this module as a script: only the standard library.
"""

# ruff: noqa: PTH123
from __future__ import annotations

import json
import os
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING or __name__.startswith("millstream"):
    from typing import Any, Final

ANSWER_WAIT: Final = 2.0  # seconds for one answer
_LINE_BYTES: Final = 1024 * 1024  # of one protocol line; the server's first is the longest

ALL_STREAMS: Final = "/jsz?accounts=true&streams=true&config=true&limit=100000"
ALL_STREAMS_AND_CONSUMERS: Final = (
    "/jsz?accounts=true&streams=true&consumers=true&config=true&limit=100000"
)

# Requests as paths of the monitoring port -> as requests to the system account.
_REQUESTS: Final = {
    "/healthz": ("HEALTHZ", {}),
    "/healthz?js-enabled-only=true": ("HEALTHZ", {"js-enabled-only": True}),
    "/varz": ("VARZ", {}),
    ALL_STREAMS: (
        "JSZ",
        {"accounts": True, "streams": True, "config": True, "limit": 100_000},
    ),
    ALL_STREAMS_AND_CONSUMERS: (
        "JSZ",
        {"accounts": True, "streams": True, "consumer": True, "config": True, "limit": 100_000},
    ),
}

# What `status` asks every node of a cluster, by requests to $SYS.REQ.SERVER.PING.<kind>.
NODE_REQUESTS: Final = dict(
    _REQUESTS[path] for path in ("/varz", "/healthz", ALL_STREAMS_AND_CONSUMERS)
)


def ask_server(
    where: dict[str, Any], path: str, limit: int = 65536, wait: float = ANSWER_WAIT
) -> tuple[int, str]:
    """Status and body of one request; (0, reason) if there is no answer.

    `where` is {"http": address}, or {"client": address, "credentials": file, "tls": files} for a
    server without a monitoring port; in operator mode it has a "creds" file of a bearer instead.
    """
    try:
        if "http" in where:
            return _over_http(where["http"], path, limit, wait)
        return _over_system_account(where, path, limit, wait)
    except (OSError, ValueError, IndexError, KeyError) as error:
        return 0, str(error) or type(error).__name__


def _over_http(base: str, path: str, limit: int, wait: float) -> tuple[int, str]:
    host, _, port = base.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        answer = b""
        while len(answer) < limit and (part := connection.recv(65536)):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body.decode("utf-8", "replace")


def _over_system_account(
    where: dict[str, Any], path: str, limit: int, wait: float
) -> tuple[int, str]:
    kind, options = _REQUESTS[path]
    with _Session(where, wait) as session:
        session.log_in(where)
        request = json.dumps(options).encode()
        subject = f"$SYS.REQ.SERVER.{session.info['server_id']}.{kind}"
        text = session.request(subject, request, limit).decode("utf-8", "replace")
    return _content(text)


def _content(text: str) -> tuple[int, str]:
    """Status and data of an answer, without decoding the data, which may have megabytes."""
    _, end = json.JSONDecoder().raw_decode(text, text.index(":") + 1)
    if not text.startswith(',"data":', end):
        return 500, str(json.loads(text).get("error", text[:200]))
    data = text[end + len(',"data":') : -1]
    if data.startswith('{"status":'):  # of HEALTHZ
        return int(json.loads(data).get("status_code", 200)), data
    return 200, data


class _Session:
    """One connection to a server, for one request."""

    def __init__(self, where: dict[str, Any], wait: float) -> None:
        self._end = time.monotonic() + wait
        self._rest = bytearray()
        host, _, port = where["client"].rpartition("://")[2].rpartition(":")
        self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=wait)
        try:
            tls = where.get("tls")
            if tls and tls["first"]:
                self._secure(tls)
            self.info = json.loads(self._line().removeprefix(b"INFO "))
            if tls and not tls["first"]:
                self._secure(tls)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _secure(self, tls: dict[str, Any]) -> None:
        """Speak TLS; only with the holder of the very certificate that the server was given."""
        import ssl  # only for brokers with TLS: it takes longer to load than everything else

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # compared below; its authority may be unknown here
        context.load_cert_chain(tls["cert"], tls["key"])
        self._socket.settimeout(self._left())
        secured = context.wrap_socket(self._socket)
        self._socket = secured
        with open(tls["cert"], encoding="ascii") as file:
            text = file.read()
        mark = "-----END CERTIFICATE-----"
        own = ssl.PEM_cert_to_DER_cert(
            text[text.index("-----BEGIN CERT") : text.index(mark) + len(mark)]
        )
        if secured.getpeercert(binary_form=True) != own:
            raise ValueError("another certificate than the server's is presented there")

    def log_in(self, where: dict[str, Any]) -> None:
        """Log in as the user of the system account, by the password or bearer JWT in a file."""
        with open(where.get("creds") or where["credentials"], encoding="utf-8") as file:
            text = file.read()
        if "creds" in where:
            who = {"jwt": text.partition("USER JWT-----")[2].split()[0], "sig": ""}
        else:
            who = {"user": "system", "pass": json.loads(text)["system"]}
        options = {"verbose": False, "pedantic": False, "lang": "python", "version": "1"}
        self._send(b"CONNECT " + json.dumps({**options, "protocol": 1, **who}).encode() + b"\r\n")

    def request(self, subject: str, body: bytes, limit: int) -> bytes:
        """The answer to a request."""
        # All nodes share the system account: an inbox of another session would get its answers.
        inbox = f"_INBOX.{os.urandom(12).hex()}"
        self._send(
            f"SUB {inbox} 1\r\nPUB {subject} {inbox} {len(body)}\r\n".encode() + body + b"\r\n"
        )
        while True:
            line = self._line()
            if line.startswith(b"MSG "):
                size = int(line.split(b" ")[-1])
                if size > limit:
                    raise ValueError(f"the answer has {size:,} bytes, more than {limit:,}")
                return self._bytes(size)
            if line.startswith(b"-ERR"):
                raise ValueError(line.decode("utf-8", "replace").removeprefix("-ERR "))
            if line.startswith(b"PING"):
                self._send(b"PONG\r\n")

    def _send(self, data: bytes) -> None:
        self._socket.settimeout(self._left())
        self._socket.sendall(data)

    def _left(self) -> float:
        return max(0.001, self._end - time.monotonic())

    def _receive(self) -> None:
        self._socket.settimeout(self._left())
        part = self._socket.recv(65536)
        if not part:
            raise OSError("the server closed the connection")
        self._rest += part

    def _line(self) -> bytes:
        while (end := self._rest.find(b"\r\n")) < 0:
            if len(self._rest) > _LINE_BYTES:
                raise ValueError("the server sent a line that does not end")
            self._receive()
        line = bytes(self._rest[:end])
        del self._rest[: end + 2]
        return line

    def _bytes(self, size: int) -> bytes:
        while len(self._rest) < size:
            self._receive()
        return bytes(self._rest[:size])
