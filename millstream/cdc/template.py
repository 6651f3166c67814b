"""The settings file that `millstream cdc init` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from millstream.cdc.settings_file import NAME_MAX, without_password
from millstream.errors import ConfigError

__all__ = ["PASSWORD_VARIABLE", "capture_name", "settings_text", "write_settings"]

PASSWORD_VARIABLE: Final = "CDC_PASSWORD"

_TEXT: Final = """\
# A capture: the tables of a database as topics, every change exactly once.
# Check it with 'millstream cdc check', run it with 'millstream cdc run'.

# The slot, the publication and the writers have this name. It cannot be changed later.
name = {name}

# postgresql://user@host/database, mysql://user@host/database or sqlite:///file
source = {source}
# The environment variable that has the password; PGPASSWORD and ~/.pgpass work as well.
{mark}password_env = "{variable}"

# Patterns; '!' leaves tables out: ["public.*", "!public.audit_*"]
tables = {tables}

# The topic of a table, from {{table}}, {{namespace}} and {{name}}.
# topic = "{{table}}"

# "changes": every event has op, before, after and source. "rows": the row itself, and no value for
# a deletion.
# format = "changes"

# Rows that are there when the capture begins.
# snapshot = true

# A table is emptied by TRUNCATE: "stop" with an error, write an "event" of op "t", or "ignore" it.
# truncate = "stop"

# All rows of a transaction in one topic are stored in one step.
# whole_transactions = false

# How often a position is stored while nothing changes, and how much log the source may keep for
# this capture before it raises an alarm.
# heartbeat = "10s"
# log_budget = "10GiB"

# The environment variable that has the secret of the mask "hash".
# mask_key_env = "CDC_MASK_KEY"

# What one table has of its own.
# [table."public.customers"]
# topic = "customers"
# exclude = ["notes"]
# key = ["id"]
# mask = {{ email = "hash", phone = "redact", birthday = "null" }}

# A table whose new rows are events of the topics that they name.
# [[outbox]]
# table = "public.outbox"
# topic = "topic"
# key = "key"
# value = "value"
"""


def settings_text(name: str, source: str, tables: Sequence[str]) -> str:
    """A commented settings file; a password in the address is left out of it."""
    bare, password = without_password(source)
    return _TEXT.format(
        name=json.dumps(name),
        source=json.dumps(bare, ensure_ascii=False),
        mark="# " if password is None else "",
        variable=PASSWORD_VARIABLE,
        tables=json.dumps(list(tables), ensure_ascii=False),
    )


def write_settings(file: Path, text: str) -> None:
    """Write a new file that only its owner can read; an existing one is never replaced."""
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{file} exists already; it is not overwritten") from error
    with os.fdopen(handle, "w", encoding="utf-8") as opened:
        opened.write(text)


def capture_name(source: str) -> str:
    """A name for the capture of a source, like that of its database.

    >>> capture_name("postgresql://app@db/Shop-2?sslmode=require"), capture_name("mysql://db")
    ('shop_2', 'capture')
    """
    last = source.partition("://")[2].partition("?")[0].rpartition("/")[2].partition(".")[0]
    plain = "".join(char if char.isascii() and char.isalnum() else "_" for char in last.lower())
    found = plain.lstrip("_0123456789").rstrip("_")[:NAME_MAX]
    # Without a path the last part is the host.
    return found if found and "/" in source.partition("://")[2] else "capture"
