"""Copies of objects whose fields cannot be changed in place, without encoding and decoding them."""

from __future__ import annotations

import datetime as dt
from keyword import iskeyword
from typing import Any

from millstream.events.value_type import Copies
from millstream.schemas import types as t
from millstream.schemas.values.rows import takes_by_position

__all__ = ["copies_of"]


def copies_of(cls: type, record: t.Record) -> Copies | None:
    """How objects of a class are copied; None if only their bytes say what a reader gets.

    `take` gives the fields of an object if a reader would get exactly these: not those of a
    subclass, nor values that are stored in another form (True as a number, a time of another zone).
    """
    names = [field.name for field in record.fields]
    if not takes_by_position(cls, record):
        return None
    if not all(name.isidentifier() and not iskeyword(name) for name in names):
        return None
    checks = [_check(field.type) for field in record.fields]
    if not all(checks):
        return None
    # Compiled for the record's own names, as `dataclasses` does for `__init__`.
    steps = [
        f"{check.format(f'(v{index} := value.{name})', v=f'v{index}')}"
        for index, (name, check) in enumerate(zip(names, checks, strict=True))
        if check is not None
    ]
    values = "".join(f"v{index}, " for index in range(len(names)))
    code = f"lambda value: ({values}) if {' and '.join(['type(value) is cls', *steps])} else None"
    used: dict[str, Any] = {
        "__builtins__": {}, "type": type, "cls": cls, "int": int, "bool": bool, "str": str,
        "float": float, "date": dt.date, "datetime": dt.datetime, "utc": dt.UTC,
    }  # fmt: skip
    return Copies(eval(code, used), cls)


def _check(type_: t.Type) -> str | None:
    """Python code that is true for values that are read back as they are; None: there are none.

    The first use of the value is `{}`, further ones are `{v}`.
    """
    inner, nullable = t.strip(type_)
    match inner:
        case t.Int():
            code = "type({v}) is int"
        case t.Bool():
            code = "type({v}) is bool"
        case t.String():
            code = "type({v}) is str"
        case t.Float(64):
            code = "type({v}) is float"
        case t.Date():
            code = "type({v}) is date"
        case t.Timestamp(True, "us"):
            code = "type({v}) is datetime and {v}.tzinfo is utc and not {v}.fold"
        case _:
            return None
    if nullable:
        return "({} is None or " + code + ")"
    return code.replace("{v}", "{}", 1)
