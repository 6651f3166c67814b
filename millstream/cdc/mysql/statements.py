"""What a statement in the log means for captured tables. Pure.

Rows are in the log row by row; what is written there as a statement are changes of tables, and
those that remove or move all rows of one at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["Meaning", "meaning_of"]

# A name in double quotes is one with sql_mode = ANSI_QUOTES; else it is no name at all there.
_NAME: Final = r"(?:`((?:[^`]|``)+)`|\"((?:[^\"]|\"\")+)\"|([\w$]+))"
_FULL_NAME: Final = re.compile(rf"{_NAME}(?:\s*\.\s*{_NAME})?")
_COMMENT: Final = re.compile(r"/\*(?![!M]).*?\*/|--\s[^\n]*|#[^\n]*", re.DOTALL)
_CONDITIONAL: Final = re.compile(r"/\*M?!\d*(.*?)\*/", re.DOTALL)  # MySQL runs what is in it
_LITERAL: Final = re.compile(r"'(?:[^'\\]|\\.|'')*'", re.DOTALL)
_QUOTED: Final = re.compile(r"\"(?:[^\"\\]|\\.|\"\")*\"", re.DOTALL)
_TRUNCATE: Final = re.compile(r"TRUNCATE\s+(?:TABLE\s+)?", re.IGNORECASE)
_DROP: Final = re.compile(r"DROP\s+TABLES?\s+(?:IF\s+EXISTS\s+)?", re.IGNORECASE)
_DROP_DATABASE: Final = re.compile(
    r"DROP\s+(?:DATABASE|SCHEMA)\s+(?:IF\s+EXISTS\s+)?", re.IGNORECASE
)
_RENAME: Final = re.compile(r"RENAME\s+TABLES?\s+(?:IF\s+EXISTS\s+)?", re.IGNORECASE)
_ALTER: Final = re.compile(
    r"ALTER\s+(?:ONLINE\s+|IGNORE\s+)*TABLE\s+(?:IF\s+EXISTS\s+)?", re.IGNORECASE
)
_REPLACED: Final = re.compile(r"CREATE\s+OR\s+REPLACE\s+TABLE\s+", re.IGNORECASE)
_RENAMES: Final = re.compile(
    r"\bRENAME\s+(?!COLUMN\b|INDEX\b|KEY\b)(?:TO\s+|AS\s+|=\s*)?", re.IGNORECASE
)
_PARTITION: Final = re.compile(
    r"\b(?:DROP|TRUNCATE|EXCHANGE|DISCARD|IMPORT|CONVERT)\s+(?:PARTITION|TABLE|TABLESPACE)\b",
    re.IGNORECASE,
)
_ROWS: Final = re.compile(r"(?:INSERT|UPDATE|DELETE|REPLACE|LOAD\s+DATA|MERGE)\b", re.IGNORECASE)

Kind = Literal["truncated", "dropped", "renamed", "partition", "rows"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a statement does to a table."""

    kind: Kind
    database: str
    table: str  # "" for "rows" and a dropped database: it may be any


def meaning_of(statement: str, database: str) -> list[Meaning]:
    """What a statement does to tables, if it matters; `database` is the one it was run in.

    >>> meaning_of("TRUNCATE `a b`", "shop")
    [Meaning(kind='truncated', database='shop', table='a b')]
    >>> meaning_of("alter table other.t add column c int", "shop")
    []
    """
    text = _LITERAL.sub("''", _COMMENT.sub(" ", _CONDITIONAL.sub(r"\1", statement))).strip()
    if start := _TRUNCATE.match(text):
        return _named("truncated", text[start.end() :], database, first=True)
    if start := _DROP_DATABASE.match(text):
        (one,) = _named("dropped", text[start.end() :], database, first=True)
        return [Meaning("dropped", one.table, "")]
    if start := _DROP.match(text):
        return _named("dropped", text[start.end() :], database)
    if start := _REPLACED.match(text):
        return _named("dropped", text[start.end() :], database, first=True)
    if start := _RENAME.match(text):
        return _named("renamed", text[start.end() :], database)
    if start := _ALTER.match(text):
        return _altered(text[start.end() :], database)
    if _ROWS.match(text):
        return [Meaning("rows", database, "")]
    return []


def _named(kind: Kind, text: str, database: str, first: bool = False) -> list[Meaning]:
    found = [Meaning(kind, given or database, table) for given, table in _names(text)]
    return found[:1] if first else found


def _names(text: str) -> Iterator[tuple[str, str]]:
    for match in _FULL_NAME.finditer(text):
        one, two = _plain(match.groups()[:3]), _plain(match.groups()[3:])
        if not two and match[3] is not None and one.upper() in _WORDS:
            continue
        yield (one, two) if two else ("", one)


def _plain(name: Sequence[str | None]) -> str:
    ticked, quoted, bare = (part or "" for part in name)
    return bare or ticked.replace("``", "`") or quoted.replace('""', '"')


# That may be between or after the names of such statements.
_WORDS: Final = frozenset(
    ("TO", "WAIT", "NOWAIT", "RESTRICT", "CASCADE", "IF", "EXISTS", "GENERATED", "BY", "SERVER")
)


def _altered(text: str, database: str) -> list[Meaning]:
    name = _FULL_NAME.match(text)
    if name is None:
        return []
    target = _named("renamed", name[0], database, first=True)
    rest = _QUOTED.sub("''", text[name.end() :])
    if renames := _RENAMES.search(rest):
        return [*target, *_named("renamed", rest[renames.end() :], database, first=True)]
    if _PARTITION.search(rest):
        return [Meaning("partition", target[0].database, target[0].table)]
    return []
