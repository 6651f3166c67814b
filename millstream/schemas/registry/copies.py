"""Copies of objects whose fields cannot be changed in place, without encoding and decoding them."""

from __future__ import annotations

import datetime as dt
from keyword import iskeyword
from typing import Any, Final

from millstream.events.value_type import Copying
from millstream.schemas import types as t
from millstream.schemas.values.rows import takes_by_position

__all__ = ["copies_of"]

# Longer texts are not copied, so that the size of a value is known without encoding it.
TEXT_MAX: Final = 200


def copies_of(cls: type, record: t.Record) -> Copying | None:
    """How objects of a class are copied; None if only their bytes say what a reader gets.

    `take` gives the fields of an object if it fits, and if a reader would get exactly these: not
    those of a subclass, nor values that are stored in another form (True as a number, a time of
    another zone).
    """
    names = [field.name for field in record.fields]
    if not takes_by_position(cls, record):
        return None
    if not all(name.isidentifier() and not iskeyword(name) for name in names):
        return None
    steps, size = ["type(value) is cls"], 2
    for index, field in enumerate(record.fields):
        found = _check(field.type)
        if found is None:
            return None
        code, largest = found
        steps.append(code.format(f"(v{index} := value.{field.name})", v=f"v{index}"))
        # As JSON, which is the largest form; at most six bytes for a character of a name.
        size += 6 * len(field.name) + 4 + largest
    # Compiled for the record's own names, as `dataclasses` does for `__init__`.
    values = "".join(f"v{index}, " for index in range(len(names)))
    code = f"lambda value: ({values}) if {' and '.join(steps)} else None"
    used: dict[str, Any] = {
        "__builtins__": {}, "type": type, "len": len, "cls": cls, "int": int, "bool": bool,
        "str": str, "float": float, "date": dt.date, "datetime": dt.datetime, "utc": dt.UTC,
    }  # fmt: skip
    return Copying(eval(code, used), cls, lambda v: dict(zip(names, v, strict=True)), size)


def _check(type_: t.Type) -> tuple[str, int] | None:
    """Python code that is true for values that fit and are read back as they are, and their size.

    The first use of the value is `{}`, further ones are `{v}`. None: there is no such code.
    """
    inner, nullable = t.strip(type_)
    match inner:
        case t.Int(low=low, high=high):
            code, size = f"type({{v}}) is int and {low} <= {{v}} <= {high}", 20
        case t.Bool():
            code, size = "type({v}) is bool", 5
        case t.String():
            # None of these characters takes more than two bytes in any format.
            code = f"type({{v}}) is str and len({{v}}) <= {TEXT_MAX}"
            code, size = f"{code} and {{v}}.isascii() and {{v}}.isprintable()", 2 * TEXT_MAX + 2
        case t.Float(64):
            # The difference of a number and itself is 0 unless it is infinite or NaN.
            code, size = "type({v}) is float and {v} - {v} == 0", 25
        case t.Date():
            code, size = "type({v}) is date", 12
        case t.Timestamp(True, "us"):
            code, size = "type({v}) is datetime and {v}.tzinfo is utc and not {v}.fold", 34
        case _:
            return None
    return (f"({{}} is None or {code})" if nullable else code.replace("{v}", "{}", 1)), size
