"""`@postgres`: the rows of a flow in a table of PostgreSQL, exactly once. No pyspark here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

from millstream.errors import PipelineInvalid
from millstream.pipelines.declare import (
    Function,
    Output,
    checked_function,
    columns_of_key,
    declare_flow,
    place_of,
)
from millstream.settings import Secret, environment

__all__ = [
    "ADDRESS",
    "DELETED_MARK",
    "RESERVED",
    "TABLE",
    "UNCHANGED_MARK",
    "address_of",
    "postgres",
]

ADDRESS: Final = "MILLSTREAM_POSTGRES"  # environment variable with the address
TABLE: Final = "table"  # option of the output
_SCHEMES: Final = ("postgresql", "postgres")
_WORDS: Final = re.compile(r"\s*\w+\s*=")  # host=db dbname=shop
_NAME: Final = re.compile(r"[^\x00.\"]{1,63}")  # PostgreSQL cuts longer names off
# Our own names in a database, and those that our columns in staging tables have.
RESERVED: Final = "millstream_"
# Columns that rows bring along: what becomes of them.
DELETED_MARK: Final = "millstream_deleted"  # boolean: the key is to be deleted
UNCHANGED_MARK: Final = "millstream_unchanged"  # list of text: columns that keep their value


def postgres(
    *,
    table: str | None = None,
    key: str | Sequence[str] = (),
    url: str | None = None,
    name: str | None = None,
    delete_when: str | None = None,
    mode: str | None = None,
) -> Callable[[Function], Function]:
    """Rows are upserted into a table of PostgreSQL by their key, exactly once.

    `table` is its name, with its schema if it is not in the search path (default: the name of the
    function). It is created with the rows' columns if it does not exist; else it must have them,
    and a unique index on `key`. `url` is postgresql://user@host/database, or the environment
    variable MILLSTREAM_POSTGRES.

    A row that matches `delete_when` (an SQL condition, or the name of a column, which is then not
    stored; by default the column `_deleted`, if there is one) deletes its key. Columns that are
    named in the column `_unchanged`, if there is one, keep their value.

    Without a key rows are appended; `mode` is then append, else append or update (default).
    """
    chosen_key = columns_of_key(key)
    chosen_mode = mode or ("update" if chosen_key else "append")
    _check_mode(table or name or "?", chosen_key, chosen_mode, delete_when)
    if url is not None:
        _check_address(table or name or "?", url)

    def decorate(function: Function) -> Function:
        chosen = checked_function(function, name, chosen_mode)
        _check_table(chosen, table or chosen)
        output = Output(
            name=chosen,
            kind="postgres",
            key=chosen_key,
            delete_when=delete_when,
            options={TABLE: table or chosen},
            secret=None if url is None else Secret(url),
            where=place_of(function),
        )
        return declare_flow(function, output, chosen_mode)

    return decorate


def _check_mode(name: str, key: tuple[str, ...], mode: str, delete_when: str | None) -> None:
    if mode not in ("append", "update"):
        raise PipelineInvalid(f"@postgres '{name}': mode {mode!r}; choose append or update")
    if not key and mode == "update":
        raise PipelineInvalid(
            f"@postgres '{name}': mode update needs a key: @postgres(table=..., key='id')"
        )
    if not key and delete_when is not None:
        raise PipelineInvalid(
            f"@postgres '{name}': delete_when needs a key: @postgres(table=..., key='id')"
        )
    wrong = [column for column in key if not column or column.startswith(RESERVED)]
    if wrong or len(set(key)) != len(key):
        raise PipelineInvalid(f"@postgres '{name}': key {list(key)!r:.200} must name columns")


def _check_address(name: str, url: str) -> None:
    """Refuse what is not an address; what it says is not shown, because it may have a password."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        scheme = ""
    if scheme not in _SCHEMES and not _WORDS.match(url):
        hint = " Addresses of JDBC are for mp.sink." if url.startswith("jdbc:") else ""
        raise PipelineInvalid(
            f"@postgres '{name}': the url is not an address of PostgreSQL. Write it like "
            f"postgresql://user@host/database.{hint}"
        )


def _check_table(name: str, table: str) -> None:
    parts = table.split(".")
    if len(parts) > 2 or not all(_NAME.fullmatch(part) for part in parts):
        raise PipelineInvalid(
            f"@postgres '{name}': table {table!r:.100}: write the name of a table, or "
            f"schema.table, of up to 63 characters each, without quotes"
        )
    if parts[-1].startswith(RESERVED):
        raise PipelineInvalid(
            f"@postgres '{name}': table {table!r:.100}: names with {RESERVED} are Millstream's own"
        )


def address_of(output: Output) -> Secret:
    """Where the database of an output is; it may have a password in it."""
    if output.secret is not None:
        return output.secret
    given = environment(ADDRESS)
    if given is None:
        raise PipelineInvalid(
            f"'{output.name}' ({output.where}): there is no address of PostgreSQL. Give url=..., "
            f"or set the environment variable {ADDRESS}"
        )
    _check_address(output.name, given)
    return Secret(given)
