"""Which source of changes an address means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millstream.errors import ConfigError
from millstream.nearest import one_of
from millstream.settings import hide_password

if TYPE_CHECKING:
    from millstream.cdc.settings import CaptureSettings
    from millstream.cdc.source import CaptureSource

__all__ = ["open_source", "source_kind"]

_KINDS: Final = {
    "postgresql": "postgres",
    "postgres": "postgres",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
_EXAMPLES: Final = "postgresql://user@host/database, mysql://user@host/database or sqlite:///file"


def source_kind(url: str) -> str:
    """The kind of database that an address means: "postgres", "mysql" or "sqlite".

    >>> source_kind("mariadb://app@localhost/shop")
    'mysql'
    """
    scheme, mark, _ = url.partition("://")
    if not mark:
        raise ConfigError(
            f"source: {hide_password(url)!r} is not an address. Write it like {_EXAMPLES}"
        )
    if scheme not in _KINDS:
        raise ConfigError(
            f"source: '{scheme}://' is not a database whose changes can be captured: "
            f"{one_of(scheme, _KINDS, 'kind')}"
        )
    return _KINDS[scheme]


def open_source(settings: CaptureSettings) -> CaptureSource:
    """The source that a capture reads, by its address; `await source.open()` connects it."""
    kind = source_kind(settings.source)
    if kind == "postgres":
        from millstream.cdc.postgres.source import PostgresSource

        return PostgresSource(settings)
    if kind == "mysql":
        from millstream.cdc.mysql.source import MysqlSource

        return MysqlSource(settings)
    from millstream.cdc.sqlite.source import SqliteSource

    return SqliteSource(settings)
