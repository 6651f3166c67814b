"""Values that JSON can write: JSON has no NaN and no infinities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.values.fit import Fit, compile_fit, found

__all__ = ["compile_finite_fit"]

_Check: TypeAlias = Callable[[Any, str], None]


def compile_finite_fit(type_: t.Type) -> Fit:
    """`compile_fit`, which then refuses numbers that JSON cannot write."""
    fit, check = compile_fit(type_), _finite_check(type_)
    if check is None:
        return fit

    def finite_fit(value: Any) -> Any:
        plain = fit(value)
        check(plain, "")
        return plain

    return finite_fit


def _finite_check(type_: t.Type) -> _Check | None:
    """A check that every float can be written as JSON, or None if the type has no floats."""
    match type_:
        case t.Float():
            return _check_finite
        case t.Nullable():
            inner = _finite_check(type_.of)
            return inner and (lambda v, path: None if v is None else inner(v, path))
        case t.Union():
            checks = [check for check in map(_finite_check, type_.options) if check is not None]
            return _check_any if checks else None
        case t.List():
            item = _finite_check(type_.item)
            return item and (lambda v, path: _each(item, enumerate(v), path))
        case t.Map():
            value = _finite_check(type_.value)
            return value and (lambda v, path: _each(value, v.items(), path))
        case t.Record():
            plan = [(f.name, check) for f in type_.fields if (check := _finite_check(f.type))]
            return _record_check(plan) if plan else None
        case _:
            return None


def _check_finite(value: Any, path: str) -> None:
    if value - value != 0:
        raise errors.Unfit(path, "a number JSON can write", found(value))


def _each(check: _Check, pairs: Any, path: str) -> None:
    for key, value in pairs:
        check(value, f"{path}[{key!r}]")


def _record_check(plan: list[tuple[str, _Check]]) -> _Check:
    def check(value: Any, path: str) -> None:
        for name, one in plan:
            one(value[name], f"{path}.{name}" if path else name)

    return check


def _check_any(value: Any, path: str) -> None:
    """Check floats at any depth of a value of unknown option."""
    if isinstance(value, float):
        _check_finite(value, path)
    elif isinstance(value, dict):
        _each(_check_any, value.items(), path)
    elif isinstance(value, list):
        _each(_check_any, enumerate(value), path)
