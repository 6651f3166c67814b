"""The settings of a capture from a file: cdc.toml, or the table [cdc] of millstream.toml.

Every value is checked here, before anything is connected or created, and an unknown key is
refused: a misspelt `exclude` would publish a column that was meant to stay in the database.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, get_args
from urllib.parse import quote

from millstream.cdc.patterns import check_patterns
from millstream.cdc.settings import CaptureSettings, Format, Mask, OutboxSettings, TableSettings
from millstream.cdc.sources import source_kind
from millstream.errors import ConfigError
from millstream.events.subject import check_name
from millstream.nearest import check_known, one_of
from millstream.settings import (
    PROJECT_FILE,
    Secret,
    environment,
    find_project_file,
    parse_size,
    read_project_file,
    read_seconds,
)

__all__ = [
    "CAPTURE_FILE",
    "NAME_MAX",
    "check_capture",
    "load_capture",
    "source_address",
    "with_password",
    "without_password",
]

CAPTURE_FILE: Final = "cdc.toml"
NAME_MAX: Final = 40  # letters: names at the source are longer by a few, and PostgreSQL takes 63
_TABLE: Final = "cdc"
_NAME_LETTERS: Final = frozenset(string.ascii_lowercase + string.digits + "_")
_TRUNCATE: Final = ("stop", "event", "ignore")
_TOPIC_FIELDS: Final = frozenset({"namespace", "table", "name"})
_FROM_ENVIRONMENT: Final = ("password_env", "mask_key_env")
_SQLITE: Final = "sqlite:///"


def load_capture(path: Path | None = None) -> CaptureSettings:
    """The settings in a file; without a path in ./cdc.toml, or in the nearest millstream.toml.

    Keys are at the top of the file, or in its table [cdc]. The password of the source and the key
    of masks may come from environment variables, which `password_env` and `mask_key_env` name.
    """
    file = path or _nearest()
    values = dict(_table_of(file))
    try:
        return _capture(values, file.absolute().parent)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def check_capture(settings: CaptureSettings) -> None:
    """Refuse settings with which no capture can run; they may have been made in Python."""
    _check_name(settings.name)
    _check_source(settings.source)
    if settings.tables or not settings.outbox:
        check_patterns(settings.tables)
    _check_topic_template(settings.topic)
    _one_of("format", settings.format, get_args(Format))
    _one_of("truncate", settings.truncate, _TRUNCATE)
    if settings.heartbeat <= 0:
        raise ConfigError(f"heartbeat must be above 0 seconds, not {settings.heartbeat:g}")
    if settings.log_budget <= 0:
        raise ConfigError(f"log_budget must be above 0 bytes, not {settings.log_budget}")
    for name, table in settings.table.items():
        _check_table(name, table, settings)
    tables = [outbox.table for outbox in settings.outbox]
    for name in tables:
        _check_full_name("outbox", name)
        if tables.count(name) > 1:
            raise ConfigError(f"outbox: the table '{name}' is given twice")
        if name in settings.table:
            raise ConfigError(
                f"'{name}' is an outbox, which has no settings of a table: leave out one of them"
            )


def without_password(url: str) -> tuple[str, str | None]:
    """An address without the password in it, and that password as it was written.

    >>> without_password("postgresql://app:s3@db/shop"), without_password("mysql://app@db/shop")
    (('postgresql://app@db/shop', 's3'), ('mysql://app@db/shop', None))
    """
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    name, colon, password = user.partition(":")
    return f"{scheme}://{name}{at}{host}{slash}{path}", password if colon else None


# -- where the settings are ---------------------------------------------------------------


def _nearest() -> Path:
    here = Path(CAPTURE_FILE)
    if here.is_file():
        return here
    project = find_project_file()
    if project is not None and _TABLE in read_project_file(project):
        return project
    found = f"{project} has no table [{_TABLE}]" if project else f"there is no {PROJECT_FILE}"
    raise ConfigError(
        f"no settings of a capture: there is no {CAPTURE_FILE} in this folder, and {found}. "
        f"Write one with 'millstream cdc init', or name its file"
    )


def _table_of(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise ConfigError(f"there is no file {file}. Write one with 'millstream cdc init {file}'")
    content = read_project_file(file)
    table = content.get(_TABLE)
    if file.name == PROJECT_FILE or isinstance(table, dict):
        if not isinstance(table, dict):
            raise ConfigError(f"{file} has no table [{_TABLE}] with the settings of a capture")
        others = sorted(set(content) - {_TABLE})
        if others and file.name != PROJECT_FILE:
            raise ConfigError(
                f"{file}: '{others[0]}' is outside of the table [{_TABLE}]; move it there"
            )
        return table
    return content


# -- from values to settings --------------------------------------------------------------


def _capture(values: dict[str, Any], folder: Path) -> CaptureSettings:
    known = [item.name for item in fields(CaptureSettings)]
    check_known(values, [*known, *_FROM_ENVIRONMENT])
    for name in ("name", "source"):
        if name not in values:
            raise ConfigError(f"'{name}' is missing: {_EXPLAINED[name]}")
    password = _variable(values, "password_env")
    mask_key = _variable(values, "mask_key_env")
    if mask_key is not None:
        if "mask_key" in values:
            raise ConfigError("give mask_key or mask_key_env, not both")
        values["mask_key"] = mask_key
    read = {name: _READERS[name](name, value) for name, value in values.items()}
    read["source"] = source_address(read["source"], password, folder)
    settings = CaptureSettings(**read)
    check_capture(settings)
    return settings


def _variable(values: dict[str, Any], key: str) -> str | None:
    """What an environment variable holds whose name is a setting."""
    if key not in values:
        return None
    name = _text(key, values.pop(key))
    found = environment(name)
    if found is None:
        raise ConfigError(f"{key}: the environment variable {name} is not set")
    return found


def source_address(url: str, password: str | None, folder: Path) -> str:
    """The address with its password; the file of a SQLite database is relative to the settings."""
    if source_kind(url) == "sqlite" and url.startswith(_SQLITE):
        file = Path(url.removeprefix(_SQLITE))
        url = f"{_SQLITE}{file if file.is_absolute() else folder / file}"
    return url if password is None else with_password(url, password)


def with_password(url: str, password: str) -> str:
    """An address with a password that was given apart from it."""
    bare, given = without_password(url)
    if given is not None:
        raise ConfigError("give the password in the address or by password_env, not both")
    scheme, _, rest = bare.partition("://")
    user, at, host = rest.rpartition("@")
    if not at or not user or source_kind(url) == "sqlite":
        raise ConfigError(
            f"password_env needs a user in the address: {scheme}://USER@host/database"
        )
    return f"{scheme}://{user}:{quote(password, safe='')}@{host}"


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be a text, not {value!r:.60}")
    return value


def _secret_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be a text that is not empty")  # without what it is
    return value


def _secret(name: str, value: Any) -> Secret:
    return Secret(_secret_text(name, value))


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ConfigError(f'{name} must be a list of texts, such as ["a", "b"], not {value!r:.60}')
    return tuple(value)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r:.60}")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool):
        raise ConfigError(f"{name} must be a duration such as '10s', not {value!r}")
    return read_seconds(name, value)


def _size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"{name} must be a size such as '10GiB', not {value!r:.60}")
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _masks(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f'{name} must be a table of columns, such as {{email = "hash"}}')
    return {column: _text(f"{name}.{column}", mask) for column, mask in value.items()}


def _tables(name: str, value: Any) -> dict[str, TableSettings]:
    if not isinstance(value, dict) or not all(isinstance(one, dict) for one in value.values()):
        raise ConfigError(f'{name} must have a table for each name: [cdc.table."public.orders"]')
    return {full: _one_table(full, own) for full, own in value.items()}


def _one_table(full: str, own: dict[str, Any]) -> TableSettings:
    # `[cdc.table.public.orders]`, without quotes, is a table in a table.
    if own and all(isinstance(one, dict) for name, one in own.items() if name != "mask"):
        inner = next((name for name in own if name != "mask"), None)
        if inner is not None:
            raise ConfigError(f'a name with a dot needs quotes: write [cdc.table."{full}.{inner}"]')
    with_name = f'table "{full}"'
    try:
        check_known(own, _TABLE_READERS)
        return TableSettings(
            **{name: _TABLE_READERS[name](name, value) for name, value in own.items()}
        )
    except ConfigError as error:
        raise ConfigError(f"{with_name}: {error}") from error


def _outboxes(name: str, value: Any) -> tuple[OutboxSettings, ...]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ConfigError(f"{name} must be a list of tables: [[cdc.outbox]]")
    return tuple(_outbox(own) for own in value)


def _outbox(own: dict[str, Any]) -> OutboxSettings:
    try:
        check_known(own, [item.name for item in fields(OutboxSettings)])
        if "table" not in own:
            raise ConfigError("'table' is missing: the table whose new rows are events")
        given = {name: _text(name, value) for name, value in own.items() if value is not False}
        # There is no null in TOML: `id = false` says that there is no such column.
        for absent in (name for name, value in own.items() if value is False):
            if absent not in ("headers", "id"):
                raise ConfigError(f"{absent} must be the name of a column, not false")
            given[absent] = None  # type: ignore[assignment]
        return OutboxSettings(**given)
    except ConfigError as error:
        raise ConfigError(f"outbox: {error}") from error


_READERS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "name": _text,
    "source": _secret_text,
    "tables": _texts,
    "table": _tables,
    "outbox": _outboxes,
    "topic": _text,
    "format": _text,
    "snapshot": _switch,
    "whole_transactions": _switch,
    "truncate": _text,
    "mask_key": _secret,
    "heartbeat": _seconds,
    "log_budget": _size,
}
_TABLE_READERS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "topic": _text,
    "columns": _texts,
    "exclude": _texts,
    "key": _texts,
    "mask": _masks,
    "text": _texts,
}
_EXPLAINED: Final = {
    "name": 'the name of the capture, such as name = "shop"',
    "source": 'the database, such as source = "postgresql://app@localhost/shop"',
}


# -- checks -------------------------------------------------------------------------------


def _check_name(name: str) -> None:
    if not name or set(name) - _NAME_LETTERS or not name[0].isalpha() or len(name) > NAME_MAX:
        raise ConfigError(
            f"name: {name!r:.60} does not do. The slot at the source gets this name: up to "
            f"{NAME_MAX} lower-case letters, digits and '_', with a letter first"
        )


def _check_source(url: str) -> None:
    if source_kind(url) == "sqlite":
        if not url.startswith(_SQLITE) or url == _SQLITE:
            raise ConfigError("source: write the file of a SQLite database as sqlite:///shop.db")
        return
    # It would be shown: only the password before the host is taken out of messages.
    query = url.partition("?")[2]
    if any(part.partition("=")[0].endswith("password") for part in query.split("&")):
        raise ConfigError(
            "source: write the password before the host (user:password@host), or name an "
            "environment variable that has it by password_env, not after the '?'"
        )


def _check_topic_template(template: str) -> None:
    try:
        named = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"topic: {template!r} is not a template: {error}") from error
    for name in named:
        if name not in _TOPIC_FIELDS:
            hint = one_of(name, _TOPIC_FIELDS, "field")
            raise ConfigError(f"topic: {{{name}}} means nothing: {hint}")


def _check_table(name: str, own: TableSettings, settings: CaptureSettings) -> None:
    _check_full_name("table", name)
    if own.topic is not None:
        check_name("topic", own.topic)
    if own.columns and own.exclude:
        raise ConfigError(f'table "{name}": give columns or exclude, not both')
    for column, mask in own.mask.items():
        _one_of(f'table "{name}": mask of {column}', mask, get_args(Mask))
    captured = set(own.columns)
    for what, columns in (("key", own.key), ("text", own.text), ("mask", tuple(own.mask))):
        for column in columns:
            if column in own.exclude or (captured and column not in captured):
                raise ConfigError(f"table \"{name}\": '{column}' is in {what}, and is not captured")
    hidden = [column for column in own.key if own.mask.get(column) in ("null", "redact")]
    if hidden:
        raise ConfigError(
            f"table \"{name}\": the key column '{hidden[0]}' cannot be masked by "
            f"'{own.mask[hidden[0]]}': all rows would have one key. Use 'hash'"
        )
    if "hash" in own.mask.values() and settings.mask_key is None:
        raise ConfigError(
            f'table "{name}": the mask "hash" needs a secret, else values can be guessed: '
            f"mask_key_env = the environment variable that has it"
        )


def _check_full_name(what: str, name: str) -> None:
    if any(char in name for char in "*?!") or not name.strip():
        raise ConfigError(f"{what} {name!r}: give the full name of one table, not a pattern")


def _one_of(name: str, value: str, known: Iterable[str]) -> None:
    known = tuple(known)
    if value not in known:
        raise ConfigError(f"{name}: {value!r:.60} is not one of {', '.join(known)}")
