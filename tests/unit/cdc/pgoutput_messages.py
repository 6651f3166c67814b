"""Messages of pgoutput as a server builds them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from millstream.cdc.postgres.pgoutput import Relation, RelationColumn

__all__ = ["UNCHANGED", "Value", "change", "relation", "relation_payload", "tuple_bytes"]

OID = 4711


class Unchanged:
    """The only value of its kind."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED = Unchanged()
Value = str | None | Unchanged


def relation(*names: str, identity: str = "d") -> Relation:
    """A table of text columns; the first one is the key."""
    columns = (RelationColumn(name, i == 0, 25, -1) for i, name in enumerate(names))
    return Relation(OID, "public", "orders", identity, tuple(columns))


def relation_payload(one: Relation) -> bytes:
    parts = [b"R", struct.pack(">I", one.oid), one.namespace.encode(), b"\0"]
    parts += [one.name.encode(), b"\0", one.identity.encode()]
    parts += [struct.pack(">H", len(one.columns))]
    for column in one.columns:
        parts += [bytes([column.is_key]), column.name.encode(), b"\0"]
        parts += [struct.pack(">Ii", column.type_oid, column.typmod)]
    return b"".join(parts)


def tuple_bytes(values: Sequence[Value]) -> bytes:
    parts = [struct.pack(">H", len(values))]
    for value in values:
        if isinstance(value, str):
            text = value.encode()
            parts += [b"t", struct.pack(">I", len(text)), text]
        else:
            parts.append(b"n" if value is None else b"u")
    return b"".join(parts)


def change(
    kind: str,
    new: Sequence[Value] | None = None,
    old: Sequence[Value] | None = None,
    old_kind: str = "O",
    oid: int = OID,
) -> bytes:
    parts = [kind.encode(), struct.pack(">I", oid)]
    if old is not None:
        parts += [old_kind.encode(), tuple_bytes(old)]
    if new is not None:
        parts += [b"N", tuple_bytes(new)]
    return b"".join(parts)
