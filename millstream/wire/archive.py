"""The archive that a server sends as the snapshot of a stream, and takes to restore one. Pure.

It is an S2 stream: frames of up to a few megabytes, each with a CRC-32C of what it holds. Inside
are the state of the stream, its consumers, its messages in order, and an end marker. Two things are
done to it here, both without decompressing more than the first or the last frame:

- `Ending` adds messages before the end marker. A stream that keeps only the last messages of each
  subject drops a message when the next one is stored, also while the server copies it: a key that
  changes meanwhile would be missing, with its old and its new value. So what was stored since is
  read and added.
- `opened` changes the head: where the log ends, and how far its consumers are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from millstream.errors import BackupError

__all__ = ["ArchiveEntry", "Ending", "Floor", "Head", "MessageDigest", "opened"]

MAGIC: Final = b"NATSARC1"
STATE: Final = "state.json"
CONSUMERS: Final = "consumers/"
END: Final = bytes(5)  # an entry without name, time, sequence, headers and payload

COMPRESSED: Final = 0x00
PLAIN: Final = 0x01
STREAM_START: Final = b"\xff\x06\x00\x00S2sTwO"
FRAME_BYTES: Final = 1024 * 1024  # of content in a frame that is written here
BLOCK_BYTES_MAX: Final = 4 * 1024 * 1024  # of content in a frame of any writer
HEAD_BYTES_MAX: Final = 256 * 1024 * 1024  # some 100,000 consumers


# -- S2 frames ----------------------------------------------------------------------------


class Frame(NamedTuple):
    """One frame of a file: where its header starts, its kind and the bytes after the header."""

    start: int
    kind: int
    size: int

    @property
    def end(self) -> int:
        return self.start + 4 + self.size

    @property
    def has_content(self) -> bool:
        return self.kind in (COMPRESSED, PLAIN)


def frames(file: BinaryIO, size: int) -> Iterator[Frame]:
    """The frames of a file of that size; BackupError if it ends inside of one."""
    at = 0
    while at < size:
        file.seek(at)
        header = file.read(4)
        frame = Frame(at, header[0], int.from_bytes(header[1:4], "little"))
        if len(header) < 4 or frame.end > size:
            raise BackupError("the archive ends in the middle: it is not complete")
        yield frame
        at = frame.end


def decoded(kind: int, body: bytes) -> bytes:
    """The content of a frame; BackupError if it is damaged."""
    try:
        content = body[4:] if kind == PLAIN else _decompress(body[4:])
    except (IndexError, ValueError) as error:
        raise BackupError(f"a frame of the archive is damaged: {error}") from error
    if _masked_crc(content) != int.from_bytes(body[:4], "little"):
        raise BackupError("a frame of the archive is damaged: its checksum does not match")
    return content


def encoded(content: bytes) -> Iterator[bytes]:
    """Frames that hold the content as it is."""
    for at in range(0, len(content), FRAME_BYTES):
        part = content[at : at + FRAME_BYTES]
        yield b"".join(
            (
                bytes((PLAIN,)),
                (len(part) + 4).to_bytes(3, "little"),
                _masked_crc(part).to_bytes(4, "little"),
                part,
            )
        )


def _decompress(block: bytes) -> bytes:
    """The content of an S2 block."""
    size, at = _uvarint(block, 0)
    if size > BLOCK_BYTES_MAX:
        raise ValueError(f"it claims to hold {size:,} bytes")
    out = bytearray()
    offset = 0
    while at < len(block):
        tag = block[at]
        at += 1
        if tag & 3 == 0:
            length, at = _literal_length(block, tag, at)
            out += block[at : at + length]
            at += length
            continue
        length, offset, at = _copy(block, tag, at, offset)
        start = len(out) - offset
        if offset <= 0 or start < 0 or len(out) + length > size:
            raise ValueError("a copy refers to nothing")
        if offset >= length:
            out += out[start : start + length]
        else:  # it overlaps what it writes: a repeated pattern
            out += (bytes(out[start:]) * (length // offset + 1))[:length]
    if len(out) != size:
        raise ValueError(f"it holds {len(out):,} of {size:,} bytes")
    return bytes(out)


def _literal_length(block: bytes, tag: int, at: int) -> tuple[int, int]:
    length = tag >> 2
    if length < 60:
        return length + 1, at
    more = length - 59
    return int.from_bytes(block[at : at + more], "little") + 1, at + more


def _copy(block: bytes, tag: int, at: int, last: int) -> tuple[int, int, int]:
    """Length and offset of a copy, and where the next tag is; offset 0 repeats the last one."""
    kind = tag & 3
    if kind != 1:
        size = 2 if kind == 2 else 4
        return (tag >> 2) + 1, int.from_bytes(block[at : at + size], "little"), at + size
    offset = (tag & 0xE0) << 3 | block[at]
    length, at = tag >> 2 & 7, at + 1
    if offset:
        return length + 4, offset, at
    if length < 5:
        return length + 4, last, at
    size = length - 4
    base = (4, 1 << 8, 1 << 16)[size - 1]
    return int.from_bytes(block[at : at + size], "little") + base + 4, last, at + size


_POLYNOMIAL: Final = 0x82F63B78


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC_TABLE: Final = _crc_table()


def _crc(content: bytes) -> int:
    """CRC-32C. For single frames: a byte takes a tenth of a microsecond."""
    value, table = 0xFFFFFFFF, _CRC_TABLE
    for byte in content:
        value = value >> 8 ^ table[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def _masked_crc(content: bytes) -> int:
    """The CRC as frames hold it."""
    value = _crc(content)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _uvarint(content: bytes | bytearray, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _put_uvarint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# -- entries ------------------------------------------------------------------------------


class ArchiveEntry(NamedTuple):
    """A message, or a named document, of an archive. `time`: nanoseconds since 1970."""

    name: str | bytes
    time: int
    sequence: int
    headers: bytes
    payload: bytes

    def encoded(self) -> bytes:
        name = self.name.encode() if isinstance(self.name, str) else self.name
        sign = self.time << 1 ^ (self.time >> 63)
        numbers = (len(name), sign, self.sequence, len(self.headers), len(self.payload))
        return b"".join((*map(_put_uvarint, numbers), name, self.headers, self.payload))


def _document(content: bytes | bytearray, at: int) -> tuple[ArchiveEntry, int] | None:
    """The entry that starts at `at`, and where it ends; None: more content is needed."""
    numbers = []
    try:
        for _ in range(5):
            number, at = _uvarint(content, at)
            numbers.append(number)
    except IndexError:
        return None
    name, time, sequence, headers, payload = numbers
    end = at + name + headers + payload
    if end > len(content):
        return None
    start = end - payload
    entry = ArchiveEntry(
        bytes(content[at : at + name]).decode(),
        time >> 1 ^ -(time & 1),
        sequence,
        bytes(content[at + name : start]),
        bytes(content[start:end]),
    )
    return entry, end


# -- the end of an archive ----------------------------------------------------------------


class Ending:
    """The end of a complete archive file, where messages can be added.

    BackupError if the file is not complete: its end marker is missing.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        last = None
        for frame in frames(file, size):
            if frame.has_content:
                last = frame
        if last is None:
            raise BackupError("the archive is empty: it is not complete")
        file.seek(last.start + 4)
        content = decoded(last.kind, file.read(last.size))
        if not content.endswith(END):
            raise BackupError("the archive has no end marker: it is not complete")
        self._start = last.start
        self._content = bytearray(content.removesuffix(END))

    def cut(self) -> None:
        """Take the end marker off; `add` and `finish` must follow."""
        self._file.seek(self._start)
        self._file.truncate()

    def add(self, entries: Iterable[ArchiveEntry]) -> None:
        """Add messages in their order."""
        for entry in entries:
            self._content += entry.encoded()
            if len(self._content) >= FRAME_BYTES:
                self._write()

    def finish(self) -> None:
        """Put the end marker back."""
        self._content += END
        self._write()

    def _write(self) -> None:
        for frame in encoded(bytes(self._content)):
            self._file.write(frame)
        self._content.clear()


# -- the head of an archive ---------------------------------------------------------------


class Floor(NamedTuple):
    """How far a consumer has acked everything: in its own count, and in the stream's."""

    consumer: int
    stream: int


@dataclass(frozen=True, slots=True)
class Head:
    """What a restored stream starts from, where that differs from the archive."""

    last_sequence: int  # the log ends at least here: positions up to it may be known to readers
    floors: Mapping[str, Floor]  # of the consumers to restore, which are no further than this
    replicas: int = 1  # of the stream; a consumer cannot have more
    added: int = 0  # messages that the archive has in addition to what its state says


def opened(file: BinaryIO, size: int, head: Head) -> Iterator[bytes]:
    """The bytes of an archive file, with another head."""
    content = bytearray()
    parsed = None
    end = 0
    for frame in frames(file, size):
        end = frame.end
        if not frame.has_content:
            continue
        file.seek(frame.start + 4)
        content += decoded(frame.kind, file.read(frame.size))
        parsed = _changed(content, head)
        if parsed is not None:
            break
        if len(content) > HEAD_BYTES_MAX:
            raise BackupError(f"the archive has more than {HEAD_BYTES_MAX:,} bytes of consumers")
    if parsed is None:
        raise BackupError("the archive ends before its messages: it is not complete")
    yield STREAM_START
    yield from encoded(parsed)
    file.seek(end)
    while part := file.read(FRAME_BYTES):
        yield part


class _Found(NamedTuple):
    """The head of an archive, as it is, and where its messages start."""

    state: ArchiveEntry
    consumers: list[ArchiveEntry]
    end: int


def _head_of(content: bytearray) -> _Found | None:
    """The head of an archive that starts like this; None: more content is needed."""
    if len(content) < len(MAGIC):
        return None
    if not content.startswith(MAGIC):
        raise BackupError(
            "the archive has a format that is not known here: the server that wrote it is newer "
            "or older. Use the version of Millstream that runs it"
        )
    found = _document(content, len(MAGIC))
    if found is None:
        return None
    state, at = found
    if state.name != STATE:
        raise BackupError(f"the archive starts with '{state.name!r}' instead of its state")
    consumers = []
    for _ in range(msgspec.json.decode(state.payload).get("consumer_count", 0)):
        found = _document(content, at)
        if found is None:
            return None
        consumers.append(found[0])
        at = found[1]
    return _Found(state, consumers, at)


def _changed(content: bytearray, head: Head) -> bytes | None:
    """The content with another head; None: more content is needed."""
    found = _head_of(content)
    if found is None:
        return None
    consumers = []
    for document in found.consumers:
        floor = head.floors.get(str(document.name).removeprefix(CONSUMERS))
        if floor is not None:
            payload = _no_further(document.payload, floor, head.replicas)
            consumers.append(document._replace(payload=payload))
    state: dict[str, Any] = msgspec.json.decode(found.state.payload)
    state["consumer_count"] = len(consumers)
    state["last_seq"] = max(state["last_seq"], head.last_sequence)
    state["messages"] += head.added
    if not state["messages"]:  # the server refuses an empty log that does not start after its end
        state["first_seq"] = state["last_seq"] + 1
    first = found.state._replace(payload=msgspec.json.encode(state))
    rest = content[found.end :]
    return b"".join((MAGIC, first.encoded(), *(c.encoded() for c in consumers), rest))


def _no_further(payload: bytes, floor: Floor, replicas: int) -> bytes:
    """A consumer that has acked no more than up to the floor; the rest is delivered again."""
    document: dict[str, Any] = msgspec.json.decode(payload)
    if document["config"].get("num_replicas", 0) > replicas:
        document["config"]["num_replicas"] = 0  # as many as the stream has
    if document["state"]["ack_floor"]["stream_seq"] > floor.stream:
        position = {"consumer_seq": floor.consumer, "stream_seq": floor.stream}
        document["state"] = {"delivered": position, "ack_floor": position}
    return msgspec.json.encode(document)


# -- what an archive holds ----------------------------------------------------------------


class MessageDigest:
    """The CRC-32C and the length of all messages of an archive: sequence, time, subject and bytes.

    It follows from the CRCs of the frames, so only those of the head are decompressed, and it does
    not depend on how the messages are spread over frames.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()  # of a frame that has not arrived completely
        self._head: bytearray | None = bytearray()  # its content so far; None: it was found
        self._head_crc = self._head_size = self._crc = self._size = 0

    def feed(self, part: bytes) -> None:
        """Take the next bytes of the archive."""
        self._bytes += part
        at = 0
        while len(self._bytes) - at >= 4:
            size = int.from_bytes(self._bytes[at + 1 : at + 4], "little")
            if len(self._bytes) - at < 4 + size:
                break
            if self._bytes[at] in (COMPRESSED, PLAIN):
                self._frame(self._bytes[at], bytes(self._bytes[at + 4 : at + 4 + size]))
            at += 4 + size
        del self._bytes[:at]

    def _frame(self, kind: int, body: bytes) -> None:
        size = len(body) - 4 if kind == PLAIN else _uvarint(body, 4)[0]
        masked = int.from_bytes(body[:4], "little") - 0xA282EAD8 & 0xFFFFFFFF
        crc = (masked >> 17 | masked << 15) & 0xFFFFFFFF
        self._crc = _product(_power(size), self._crc) ^ crc
        self._size += size
        if self._head is None:
            return
        self._head += decoded(kind, body)
        found = _head_of(self._head)
        if found is not None:
            self._head_size = found.end
            self._head_crc = _crc(bytes(self._head[: found.end]))
            self._head = None

    @property
    def value(self) -> str:
        """The digest of all that was fed; BackupError if it ended inside of a frame."""
        if self._head is not None or self._bytes:
            raise BackupError("the archive ends in the middle: it is not complete")
        size = self._size - self._head_size
        return f"{self._crc ^ _product(_power(size), self._head_crc):08x}-{size}"


def _product(one: int, other: int) -> int:
    """The product of two polynomials modulo that of CRC-32C, bits reversed."""
    result, bit = 0, 1 << 31
    while one:
        if one & bit:
            result ^= other
            one ^= bit
        bit >>= 1
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return result


def _power(size: int) -> int:
    """What a CRC is multiplied with when that many bytes follow: x to the power of 8 * size."""
    result, square, exponent = 1 << 31, 1 << 30, 8 * size
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result
