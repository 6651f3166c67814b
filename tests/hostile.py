"""Messages that only a hostile client stores: every header that has a meaning, with odd values."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from millstream import Mill
from millstream.events.packs.pack import encode, envelope

__all__ = ["VALUE", "Hostile", "hostile_messages", "store"]

HEADERS = (
    *("Mill-Time", "Mill-Key", "Mill-Null", "Mill-Pack", "Mill-Count", "Mill-Checksum"),
    *("Mill-Schema", "Mill-Id", "Mill-For", "Mill-Redrives", "Mill-Writer", "Mill-Epoch"),
    *("Mill-Number", "Mill-Previous", "Mill-Position", "Mill-Part", "Mill-Dead-Order"),
    *("Mill-Dead-Cause", "Mill-Dead-Pack", "Mill-Dead-Offset"),
    *("Nats-Msg-Id", "Nats-Marker-Reason", "Nats-Stream", "Nats-Sequence", "Nats-Subject"),
)
VALUES = (
    b"99999999999999999999",
    b"-99999999999999999999",
    b"9" * 4000,
    b"\xff\xfe",
    b"",
    b"x y",
    b"\0",
)
LINES = (
    b"X-\xff: 1\r\n",
    b"X: \xff\r\n",
    b"a b: 1\r\n",
    b": 1\r\n",
    b"no colon\r\n",
    "\N{SKULL}: \N{SKULL}\r\n".encode(),
    b"X: 1\r\nX: 2\r\n",
    b"Mill-Time: x\r\nMill-Time: 5\r\n",
    b"Mill-Pack: 1\r\nMill-Pack: 1\r\n",
)
# Blocks of headers without an end.
ENDLESS = (
    b"NATS/1.0\r\nNa",
    b"NATS/1.0\r\nMill-For: x\r\n",
    b"NATS/1.0\r\nMill-Pack: 1\r\n\r\n{",
    b"N",
)
VALUE = b'{"sensor":1}'


class Hostile(NamedTuple):
    """A message, and what becomes of it."""

    token: bytes  # of its subject, after the topic's name
    block: bytes
    payload: bytes = VALUE
    is_event: bool = True  # handed out by readers
    unreadable: bool = False  # damaged, or not the pack that it is marked as
    bad_schema: bool = False  # its value cannot be decoded in a topic with a schema


def hostile_messages() -> list[Hostile]:
    """One for each header and value, odd lines, damaged packs and damaged messages."""
    found: list[Hostile] = []
    for name in HEADERS:
        for value in VALUES:
            lines = f"{name}: ".encode() + value + b"\r\n"
            found.append(_message(len(found), lines, name))
    for line in LINES:
        found.append(_message(len(found), line, "Mill-Pack" if b"-Pack" in line else ""))
    found.append(Hostile(b"t\xff", b""))
    found.append(Hostile(b"long" * 700, b""))
    found += _damaged_packs()
    for block in ENDLESS:
        found.append(Hostile(b"k%d" % len(found), block, is_event=False, unreadable=True))
    return found


def _message(number: int, lines: bytes, name: str) -> Hostile:
    bad_pack = name == "Mill-Pack"
    return Hostile(
        b"k%d" % number,
        b"NATS/1.0\r\n" + lines + b"\r\n",
        is_event=not bad_pack and name != "Mill-For",
        unreadable=bad_pack,
        bad_schema=name == "Mill-Schema",
    )


def _damaged_packs() -> list[Hostile]:
    """Packs whose headers are right and whose bytes are not, with a checksum that says they are."""
    import pyarrow as pa

    sound = encode(envelope(pa.array([VALUE, VALUE]), key=pa.array([b"a", b"b"])))
    data = bytes(memoryview(sound.payload))
    found = []
    for at in (0, 4, 8, len(data) // 3, len(data) // 2):
        damaged = data[:at] + b"\xff\xff\xff\x7f" + data[at + 4 :] if at else b""
        headers = sound.headers | {"Mill-Checksum": f"{zlib.crc32(damaged):08x}"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
        block = b"NATS/1.0\r\n" + lines + b"\r\n"
        found.append(Hostile(b"_pack.w", block, damaged, is_event=False, unreadable=True))
    return found


async def store(mill: Mill, topic: str) -> list[Hostile]:
    """Store all of them in a topic, from offset 1 on, and a good one after them."""
    messages = hostile_messages()
    for one in messages:
        mill.connection.publish(topic.encode() + b"." + one.token, one.payload, b"", one.block)
    last = await mill.publish_acked(f"{topic}.last", VALUE)
    assert last.offset == len(messages) + 1, "the server refused one of them"
    return messages
