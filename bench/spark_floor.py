"""The upper limit of reading plain messages: bare sockets that pull and count, no parsing."""

from __future__ import annotations

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from millstream.wire.protocol import unique_token

__all__ = ["drain_rate"]

WINDOW = 20_000
SILENCE_SECONDS = 30.0
_STATUS = b"\r\nNATS/1.0 "
_TAIL = 512  # bytes: a status that ends a window is shorter
_CONNECT = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'


def drain_rate(url: str, stream: str, count: int, readers: int = 1) -> float:
    """Messages a second when a stream is read from its start, each reader its share of it.

    A reader is a thread: nearly all of its time is spent in `recv`, where others can run.
    """
    share = count // readers
    parts = [(1 + number * share, share) for number in range(readers - 1)]
    parts.append((1 + (readers - 1) * share, count - (readers - 1) * share))
    with ThreadPoolExecutor(readers) as pool:
        began = time.perf_counter()
        for reading in [pool.submit(_drain, url, stream, *part) for part in parts]:
            reading.result()
        return count / (time.perf_counter() - began)


def _drain(url: str, stream: str, start: int, count: int) -> None:
    """Read `count` messages from a sequence on, by an ephemeral consumer."""
    at = urlsplit(url)
    link = socket.create_connection((at.hostname or "", at.port or 4222), SILENCE_SECONDS)
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.recv(65536)
        inbox = f"_INBOX.{unique_token()}"
        link.sendall(_CONNECT + f"SUB {inbox}.* 1\r\nPING\r\n".encode())
        while b"PONG\r\n" not in link.recv(65536):
            pass
        consumer = _create(link, inbox, stream, start)
        found = 0
        mark = f" $JS.ACK.{stream}.".encode()
        while found < count:
            wanted = min(count, found + WINDOW)
            body = json.dumps({"batch": wanted - found, "no_wait": True}).encode()
            verb = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
            link.sendall(f"PUB {verb} {inbox}.m {len(body)}\r\n".encode() + body + b"\r\n")
            tail = b""
            # A status ends a window before all that was asked for: the next one asks for the rest.
            while found < wanted and _STATUS not in tail:
                new = link.recv(1024 * 1024)
                if not new:
                    raise ConnectionError(f"{url} closed the connection")
                data = tail[-len(mark) + 1 :] + new
                found += data.count(mark)
                tail = data[-_TAIL:]


def _create(link: socket.socket, inbox: str, stream: str, start: int) -> str:
    name = unique_token(12)
    config = {"name": name, "ack_policy": "none", "mem_storage": True, "inactive_threshold": 10**10}
    config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": start}
    body = json.dumps({"stream_name": stream, "config": config}).encode()
    verb = f"$JS.API.CONSUMER.CREATE.{stream}.{name}"
    link.sendall(f"PUB {verb} {inbox}.c {len(body)}\r\n".encode() + body + b"\r\n")
    answer = b""
    while not re.search(rb'"name":"', answer):
        answer += link.recv(65536)
    return name
