"""The type model: every schema is converted to it.

Every format is mapped to and from these small frozen classes, so no code handles pairs of formats.
They are also annotations for Python classes: `price: Annotated[Decimal, types.Decimal(10, 2)]`.

A type is a tree: a schema that refers to itself has no Arrow or Spark form and is refused when it
is read. Each composite knows the size and depth of its tree, so that a schema built to explode when
it is expanded is refused while it is built, before anything walks it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

from millstream import errors

__all__ = [
    "MAX_DEPTH",
    "MAX_NAME",
    "MAX_NODES",
    "MAX_SYMBOLS",
    "MISSING",
    "Binary",
    "Bool",
    "Date",
    "Decimal",
    "Duration",
    "Enum",
    "Field",
    "Float",
    "Int",
    "List",
    "Map",
    "Missing",
    "Nullable",
    "Record",
    "Simple",
    "String",
    "Time",
    "Timestamp",
    "Type",
    "Union",
    "Uuid",
    "kind",
    "strip",
]

# Deeper nesting than any real event; keeps recursion far from the interpreter's own limit.
MAX_DEPTH: Final = 32
# Types in one schema, counted as they are expanded; Spark and Arrow slow down well before this.
MAX_NODES: Final = 5_000
# Symbols in one enum; with more it is a lookup table, not a type.
MAX_SYMBOLS: Final = 2_000
# The longest name; the strictest of the common systems (databases, Parquet readers) take 255.
MAX_NAME: Final = 255

_NAME = re.compile(r"[^\x00-\x1f\x7f.]+")


class Missing:
    """The type of `MISSING`: a field without a default, which is not the same as a default None."""

    _instance: Missing | None = None

    def __new__(cls) -> Missing:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()


@dataclasses.dataclass(frozen=True, slots=True)
class Bool:
    """True or false."""


@dataclasses.dataclass(frozen=True, slots=True)
class Int:
    """A whole number of 8, 16, 32 or 64 bits."""

    bits: int = 64
    signed: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (8, 16, 32, 64):
            raise errors.SchemaError(f"an Int has 8, 16, 32 or 64 bits, not {self.bits}")

    @property
    def low(self) -> int:
        """The smallest value."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def high(self) -> int:
        """The largest value."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Float:
    """An IEEE 754 number of 32 or 64 bits."""

    bits: int = 64

    def __post_init__(self) -> None:
        if self.bits not in (32, 64):
            raise errors.SchemaError(f"a Float has 32 or 64 bits, not {self.bits}")


@dataclasses.dataclass(frozen=True, slots=True)
class String:
    """Unicode text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Binary:
    """Bytes; with `size`, exactly that many."""

    size: int | None = None

    def __post_init__(self) -> None:
        # Arrow keeps the width of a fixed column as a signed 32-bit number; 64 KiB is ample.
        if self.size is not None and not 1 <= self.size <= 65_536:
            raise errors.SchemaError(f"a fixed Binary has 1 to 65,536 bytes, not {self.size}")


@dataclasses.dataclass(frozen=True, slots=True)
class Decimal:
    """An exact number of `precision` digits, `scale` of them after the point."""

    precision: int
    scale: int = 0

    def __post_init__(self) -> None:
        # 38 digits is what Arrow's decimal128 and Spark hold.
        if not 1 <= self.precision <= 38 or not 0 <= self.scale <= self.precision:
            raise errors.SchemaError(
                f"decimal({self.precision},{self.scale}): precision must be 1 to 38 and "
                f"scale 0 to precision"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Date:
    """A calendar day."""


Unit: TypeAlias = Literal["ms", "us"]


def _check_unit(unit: str) -> None:
    if unit not in ("ms", "us"):
        raise errors.SchemaError(f"the unit of a time is 'us' or 'ms', not {unit!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Time:
    """A time of day without a zone, in whole `unit`s."""

    unit: Unit = "us"

    def __post_init__(self) -> None:
        _check_unit(self.unit)


@dataclasses.dataclass(frozen=True, slots=True)
class Timestamp:
    """A point in time (`utc`), or what a wall clock shows (not `utc`), in whole `unit`s."""

    utc: bool = True
    unit: Unit = "us"

    def __post_init__(self) -> None:
        _check_unit(self.unit)


@dataclasses.dataclass(frozen=True, slots=True)
class Duration:
    """A span of time in microseconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Uuid:
    """A UUID; its 36-character text in every format, so that any reader can join on it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Enum:
    """One of `symbols`; readers replace unknown symbols by `default`."""

    name: str
    symbols: tuple[str, ...]
    default: str | None = None

    def __post_init__(self) -> None:
        _check_name(self.name, "enum")
        if not 1 <= len(self.symbols) <= MAX_SYMBOLS:
            raise errors.SchemaError(
                f"enum '{self.name}' has {len(self.symbols)} symbols; it may have 1 to "
                f"{MAX_SYMBOLS:,}"
            )
        _check_distinct(self.symbols, f"enum '{self.name}' has the symbol")
        for symbol in self.symbols:
            if not isinstance(symbol, str) or not symbol or len(symbol) > MAX_NAME:
                raise errors.SchemaError(f"enum '{self.name}': {symbol!r} is not a symbol")
        if self.default is not None and self.default not in self.symbols:
            raise errors.SchemaError(
                f"enum '{self.name}': the default {self.default!r} is not one of its symbols"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class _Composite:
    """Keeps the size and depth of the tree below, both bounded."""

    size_of_tree: int = dataclasses.field(init=False, compare=False, repr=False, default=1)
    depth: int = dataclasses.field(init=False, compare=False, repr=False, default=1)

    def _measure(self, children: Iterable[Type]) -> None:
        size, depth = 1, 0
        for child in children:
            size += child.size_of_tree if isinstance(child, _Composite) else 1
            depth = max(depth, child.depth if isinstance(child, _Composite) else 0)
        if size > MAX_NODES:
            raise errors.SchemaError(
                f"the schema has more than {MAX_NODES:,} types when expanded; split it"
            )
        if depth + 1 > MAX_DEPTH:
            raise errors.SchemaError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        object.__setattr__(self, "size_of_tree", size)
        object.__setattr__(self, "depth", depth + 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Nullable(_Composite):
    """`of`, or None."""

    of: Type = String()

    def __post_init__(self) -> None:
        if isinstance(self.of, Nullable):
            raise errors.SchemaError("a Nullable holds a type that is not itself nullable")
        self._measure((self.of,))


@dataclasses.dataclass(frozen=True, slots=True)
class List(_Composite):
    """Any number of `item`s in order."""

    item: Type = String()

    def __post_init__(self) -> None:
        self._measure((self.item,))


@dataclasses.dataclass(frozen=True, slots=True)
class Map(_Composite):
    """Values by distinct keys; keys are text or whole numbers."""

    value: Type = String()
    key: Type = String()

    def __post_init__(self) -> None:
        if not isinstance(self.key, (String, Int)):
            raise errors.SchemaError(
                f"the keys of a map are text or whole numbers, not {kind(self.key)}"
            )
        self._measure((self.key, self.value))


@dataclasses.dataclass(frozen=True, slots=True)
class Union(_Composite):
    """One of several types; the value itself shows which. None needs `Nullable`."""

    options: tuple[Type, ...] = ()

    def __post_init__(self) -> None:
        if len(self.options) < 2:
            raise errors.SchemaError("a union has at least two options")
        self._measure(self.options)
        _check_options(self.options)


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One field of a record: its name and type, and what readers of other versions need."""

    name: str
    type: Type
    # The value for readers if the writer did not know the field.
    default: object = dataclasses.field(default=MISSING, hash=False)
    doc: str = ""
    # Earlier names, used by older events.
    aliases: tuple[str, ...] = ()
    # The Protobuf field number, where one was declared.
    number: int | None = None

    def __post_init__(self) -> None:
        _check_name(self.name, "field")
        _check_doc(self.doc, self.name)
        for alias in self.aliases:
            _check_name(alias, "alias")
        # Protobuf's own range.
        if self.number is not None and not (
            type(self.number) is int and 1 <= self.number <= 536_870_911
        ):
            raise errors.SchemaError(
                f"field '{self.name}': {self.number!r:.40} is not a field number"
            )

    @property
    def required(self) -> bool:
        """Whether a value must carry this field."""
        return self.default is MISSING


@dataclasses.dataclass(frozen=True, slots=True)
class Record(_Composite):
    """Named fields in order; the type of a topic's values is one of these."""

    name: str = ""
    fields: tuple[Field, ...] = ()
    doc: str = ""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_record_name(self.name)
        _check_doc(self.doc, self.name)
        for alias in self.aliases:
            _check_record_name(alias)
        if not self.fields:
            raise errors.SchemaError(f"record '{self.name}' has no fields; declare at least one")
        self._measure(field.type for field in self.fields)
        names = [field.name for field in self.fields]
        aliases = [alias for field in self.fields for alias in field.aliases]
        _check_distinct(names, f"record '{self.name}' has the field")
        _check_distinct([*names, *aliases], f"record '{self.name}' uses the alias")
        numbers = [field.number for field in self.fields if field.number is not None]
        _check_distinct(numbers, f"record '{self.name}' has the field number")


Simple: TypeAlias = (
    Bool | Int | Float | String | Binary | Decimal | Date | Time | Timestamp | Duration | Uuid
)
Type: TypeAlias = Simple | Enum | Nullable | List | Map | Union | Record


def kind(type_: Type) -> str:
    """The short name of a type, as error messages and the canonical form write it."""
    match type_:
        case Int(bits, signed):
            return f"{'int' if signed else 'uint'}{bits}"
        case Float(bits):
            return f"float{bits}"
        case Binary(size):
            return "binary" if size is None else f"fixed({size})"
        case Decimal(precision, scale):
            return f"decimal({precision},{scale})"
        case Time(unit):
            return "time" if unit == "us" else "time_ms"
        case Timestamp(utc, unit):
            name = "timestamp" if utc else "local_timestamp"
            return name if unit == "us" else f"{name}_ms"
        case Enum():
            return f"enum {type_.name}"
        case Record():
            return f"record {type_.name}"
        case Nullable():
            return f"{kind(type_.of)} or null"
        case List():
            return f"list<{kind(type_.item)}>"
        case Map():
            return f"map<{kind(type_.key)}, {kind(type_.value)}>"
        case Union():
            return f"union<{', '.join(kind(option) for option in type_.options)}>"
        case _:
            return type(type_).__name__.lower()


def strip(type_: Type) -> tuple[Type, bool]:
    """The type without its Nullable, and whether it had one."""
    return (type_.of, True) if isinstance(type_, Nullable) else (type_, False)


def _check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise errors.SchemaError(
            f"{name!r} is not a usable {what} name: 1 to {MAX_NAME} characters, "
            f"no dots and no control characters"
        )


def _check_doc(doc: object, name: str) -> None:
    if not isinstance(doc, str):
        raise errors.SchemaError(f"'{name}': its doc must be text, not {doc!r:.40}")


def _check_record_name(name: object) -> None:
    if not isinstance(name, str) or len(name) > MAX_NAME:
        raise errors.SchemaError(f"{name!r} is not a usable record name")
    for part in name.split("."):
        _check_name(part, "record")


def _check_distinct(names: Iterable[object], what: str) -> None:
    seen: set[object] = set()
    for name in names:
        if name in seen:
            raise errors.SchemaError(f"{what} {name!r} twice")
        seen.add(name)


def _check_options(options: tuple[Type, ...]) -> None:
    """Refuse a union if a value could belong to two options."""
    groups: dict[str, Type] = {}
    records: list[Record] = []
    for option in options:
        if isinstance(option, (Nullable, Union)):
            raise errors.SchemaError(f"a union cannot hold a {kind(option)} directly; flatten it")
        if isinstance(option, Record):
            records.append(option)
        group = _python_group(option)
        other = groups.get(group)
        groups[group] = option
        if other is not None and not (isinstance(other, Record) and isinstance(option, Record)):
            raise errors.SchemaError(
                f"a union of {kind(other)} and {kind(option)} is ambiguous: a value could be either"
            )
    _check_distinct((r.name for r in records), "a union has the record")
    for i, one in enumerate(records):
        for two in records[i + 1 :]:
            if _overlap(one, two):
                raise errors.SchemaError(
                    f"a union of the records '{one.name}' and '{two.name}' is ambiguous: give one "
                    f"of them a required field the other does not have"
                )


def _python_group(option: Type) -> str:
    """What Python values of the option look like; two options of one group are ambiguous."""
    match option:
        case String() | Enum():
            return "text"
        case Record() | Map():
            return "mapping"
        case _:
            return type(option).__name__


def _overlap(one: Record, two: Record) -> bool:
    """Whether some set of field names is complete and known for both records."""

    def needed(record: Record) -> set[str]:
        return {f.name for f in record.fields if f.required}

    def known(record: Record) -> set[str]:
        return {f.name for f in record.fields}

    return needed(one) <= known(two) and needed(two) <= known(one)
