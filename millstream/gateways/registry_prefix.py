"""What clients of a schema registry put before every value: a zero, and the schema's id. Pure.

Before a Protobuf message follows which message of the file it is. A JSON text and a Protobuf
message never begin with a zero; an Avro value may.
"""

from __future__ import annotations

from typing import Final

from millstream.errors import SchemaError

__all__ = ["ID_MAX", "PREFIX_SIZE", "has_prefix", "read_message_path", "registry_prefix"]

PREFIX_SIZE: Final = 5
ID_MAX: Final = 2**31 - 1  # clients read a signed number
_DEPTH_MAX: Final = 32
_NUMBER_BYTES_MAX: Final = 5


def registry_prefix(schema_id: int, message_path: tuple[int, ...] = ()) -> bytes:
    """The bytes before values of a schema.

    `message_path` is for Protobuf: the message's number in its file, then in the message around it.

    >>> registry_prefix(7), registry_prefix(7, (0,)), registry_prefix(7, (2, 1)).hex()
    (b'\\x00\\x00\\x00\\x00\\x07', b'\\x00\\x00\\x00\\x00\\x07\\x00', '0000000007040402')
    """
    if not 0 < schema_id <= ID_MAX:
        raise SchemaError(f"schema id {schema_id} does not fit the registry's prefix, 31 bits")
    start = bytes([0]) + schema_id.to_bytes(4, "big")
    if message_path == (0,):
        return start + b"\0"  # by far the most frequent has a form of its own
    numbers = (len(message_path), *message_path) if message_path else ()
    return start + b"".join(map(_number, numbers))


def has_prefix(value: bytes) -> bool:
    """Whether a value begins like one with a prefix."""
    return len(value) >= PREFIX_SIZE and value[0] == 0


def read_message_path(value: bytes, at: int = PREFIX_SIZE) -> tuple[tuple[int, ...], int]:
    """Which message of a Protobuf schema follows, and where it starts; ValueError if none is said.

    >>> read_message_path(bytes.fromhex("0000000007040402") + b"..")
    ((2, 1), 8)
    """
    count, at = _read_number(value, at)
    if not count:
        return (0,), at
    if not 0 < count <= _DEPTH_MAX:
        raise ValueError(f"{count} as the number of message indexes")
    path = []
    for _ in range(count):
        index, at = _read_number(value, at)
        path.append(index)
    return tuple(path), at


def _number(value: int) -> bytes:
    coded = value << 1
    out = bytearray()
    while coded >= 0x80:
        out.append(coded & 0x7F | 0x80)
        coded >>= 7
    out.append(coded)
    return bytes(out)


def _read_number(value: bytes, at: int) -> tuple[int, int]:
    coded = 0
    for place, byte in enumerate(value[at : at + _NUMBER_BYTES_MAX]):
        coded |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return (coded >> 1) ^ -(coded & 1), at + place + 1
    raise ValueError("the message indexes are cut off")
