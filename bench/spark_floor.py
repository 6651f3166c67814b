"""The upper limit of reading plain messages: a bare socket that pulls and counts, no parsing."""

from __future__ import annotations

import json
import re
import socket
import time
from urllib.parse import urlsplit

from millstream.wire.protocol import unique_token

__all__ = ["drain_rate"]

WINDOW = 20_000
_CONNECT = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'


def drain_rate(url: str, stream: str, count: int) -> float:
    """Messages a second when a stream is read from its start by an ephemeral consumer."""
    at = urlsplit(url)
    with socket.create_connection((at.hostname or "", at.port or 4222)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.recv(65536)
        inbox = f"_INBOX.{unique_token()}"
        link.sendall(_CONNECT + f"SUB {inbox}.* 1\r\nPING\r\n".encode())
        while b"PONG\r\n" not in link.recv(65536):
            pass
        began = time.perf_counter()
        consumer = _create(link, inbox, stream)
        found = 0
        mark = f" $JS.ACK.{stream}.".encode()
        while found < count:
            body = json.dumps({"batch": WINDOW, "no_wait": True}).encode()
            verb = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
            link.sendall(f"PUB {verb} {inbox}.m {len(body)}\r\n".encode() + body + b"\r\n")
            wanted = min(count, found + WINDOW)
            tail = b""
            while found < wanted:
                data = tail + link.recv(1024 * 1024)
                found += data.count(mark)
                tail = data[-len(mark) + 1 :]
        return count / (time.perf_counter() - began)


def _create(link: socket.socket, inbox: str, stream: str) -> str:
    name = unique_token(12)
    config = {"name": name, "ack_policy": "none", "mem_storage": True, "inactive_threshold": 10**10}
    body = json.dumps({"stream_name": stream, "config": config}).encode()
    verb = f"$JS.API.CONSUMER.CREATE.{stream}.{name}"
    link.sendall(f"PUB {verb} {inbox}.c {len(body)}\r\n".encode() + body + b"\r\n")
    answer = b""
    while not re.search(rb'"name":"', answer):
        answer += link.recv(65536)
    return name
