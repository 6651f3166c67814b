"""Which tables a list of patterns means. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from millstream.errors import ConfigError

__all__ = ["check_patterns", "is_wanted"]

_OUT = "!"
_OWN = "millstream_"


def is_wanted(patterns: Sequence[str], namespace: str, table: str) -> bool:
    """Whether a table is one of those meant: some pattern fits it, and none that begins with `!`.

    A pattern with a dot is compared with the full name, another one with the table's own name.
    Tables that sinks keep their positions in are never meant.

    >>> wanted = ["public.*", "orders_20??", "!*_old"]
    >>> is_wanted(wanted, "public", "users"), is_wanted(wanted, "public", "users_old")
    (True, False)
    >>> is_wanted(wanted, "archive", "orders_2024"), is_wanted(wanted, "archive", "users")
    (True, False)
    """
    full = f"{namespace}.{table}" if namespace else table
    if table.startswith(_OWN):
        return False

    def fits(pattern: str) -> bool:
        return fnmatchcase(full if "." in pattern else table, pattern)

    out = any(fits(one.removeprefix(_OUT)) for one in patterns if one.startswith(_OUT))
    return not out and any(fits(one) for one in patterns if not one.startswith(_OUT))


def check_patterns(patterns: Sequence[str]) -> None:
    """Refuse patterns that can mean no table."""
    for pattern in patterns:
        name = pattern.removeprefix(_OUT)
        if not name or name != name.strip() or any(not char.isprintable() for char in name):
            raise ConfigError(
                f"tables: {pattern!r} is not a pattern. Write it like 'public.orders', 'public.*' "
                f"or '!public.audit_*'"
            )
    if not any(not pattern.startswith(_OUT) for pattern in patterns):
        raise ConfigError(
            "tables: no pattern says which tables are captured, only which are not. "
            "Add '*' for all others"
        )
