"""Whether a column that exists can take the values of a topic. Pure."""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa

from millstream.cdc.sink.sql import postgres_type_of, sqlite_type
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type

__all__ = ["fits_postgres", "fits_sqlite", "sqlite_affinity"]

_INTEGERS: Final = ("smallint", "integer", "bigint")
_TEXTS: Final = ("text", "character varying", "character", "citext", "bpchar")
_JSON: Final = ("json", "jsonb")
_ALIASES: Final = {
    "timestamptz": "timestamp with time zone",
    "timestamp": "timestamp without time zone",
    "time": "time without time zone",
}
# Wanted type -> others that hold all of its values.
_WIDER: Final[dict[str, tuple[str, ...]]] = {
    "real": ("double precision",),
    "date": ("timestamp without time zone",),
    "uuid": (),
    "jsonb": ("json",),
}
_EXACT_DIGITS: Final = 15  # that SQLite's own numbers hold exactly


def fits_postgres(type_: t.Type, found: str) -> bool:
    """Whether a column of type `found`, as PostgreSQL writes it, holds all values of a type.

    Text fits everywhere: what a source has no other form for (numeric without digits, inet, ...)
    is captured as text, and the database checks each value.

    >>> fits_postgres(t.Int(32), "bigint"), fits_postgres(t.Int(64), "integer")
    (True, False)
    >>> fits_postgres(t.Decimal(10, 2), "numeric(12,2)"), fits_postgres(t.Bool(), "bytea")
    (True, False)
    """
    plain, _ = t.strip(type_)
    if isinstance(plain, t.String | t.Enum) or _base(found) in _TEXTS:
        return True
    return _holds(postgres_type_of(plain), found)


def _holds(wanted: str, found: str) -> bool:
    if wanted.endswith("[]"):
        if _base(found) in _JSON:
            return True
        item = wanted.removesuffix("[]")
        return found.endswith("[]") and (item == "text" or _holds(item, found.removesuffix("[]")))
    base, name = _base(found), _ALIASES.get(_base(wanted), _base(wanted))
    if name in _INTEGERS and base in _INTEGERS:
        return _INTEGERS.index(base) >= _INTEGERS.index(name)
    if name in _INTEGERS and base == "numeric":
        digits, scale = _digits(found)
        return digits is None or digits - scale >= 5 * 2 ** _INTEGERS.index(name)
    if name == "numeric" and base == "numeric":
        (digits, scale), (most, positions) = _digits(wanted), _digits(found)
        return most is None or (
            digits is not None and positions >= scale and most - positions >= digits - scale
        )
    return base == name or base in _WIDER.get(name, ())


def _base(kind: str) -> str:
    """A type without its numbers: `numeric(10,2)` is `numeric`, `timestamp(3) ...` as well."""
    return re.sub(r"\([0-9, -]*\)", "", kind).strip()


def _digits(kind: str) -> tuple[int | None, int]:
    found = re.search(r"\((\d+)(?:, *(-?\d+))?\)", kind)
    return (int(found[1]), int(found[2] or 0)) if found else (None, 0)


def sqlite_affinity(declared: str) -> str:
    """What SQLite makes of a declared type, by its own rules.

    >>> sqlite_affinity("VARCHAR(10)"), sqlite_affinity("DECIMAL(10,2)"), sqlite_affinity("")
    ('TEXT', 'NUMERIC', 'BLOB')
    """
    name = declared.upper()
    if "INT" in name:
        return "INTEGER"
    if any(part in name for part in ("CHAR", "CLOB", "TEXT")):
        return "TEXT"
    if not name or "BLOB" in name:
        return "BLOB"
    return "REAL" if any(part in name for part in ("REAL", "FLOA", "DOUB")) else "NUMERIC"


def fits_sqlite(type_: t.Type, declared: str) -> bool:
    """Whether a column of a declared type keeps values of a type as they are.

    A column of numbers turns texts that look like numbers into numbers.
    """
    plain, _ = t.strip(type_)
    affinity = sqlite_affinity(declared)
    wanted = sqlite_type(arrow_type(plain))
    if affinity == "BLOB" or affinity == wanted:
        return True
    if isinstance(plain, t.Decimal):
        return affinity == "NUMERIC" and plain.precision <= _EXACT_DIGITS
    if wanted == "TEXT":
        # No date, time, uuid or document looks like a number.
        return affinity == "NUMERIC" and not (
            isinstance(plain, t.String | t.Enum) or arrow_type(plain) == pa.uint64()
        )
    return affinity == "NUMERIC" or (wanted == "INTEGER" and affinity == "TEXT")
