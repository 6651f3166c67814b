"""The address of a MySQL or MariaDB server. Pure, but for `connect`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from millstream import errors
from millstream.schemas.extras import needed
from millstream.settings import Secret, hide_password

__all__ = ["Address", "connect", "error_of"]

CONNECT_SECONDS: Final = 10.0
READ_SECONDS: Final = 60.0
_OPTIONS: Final = {"ssl_ca": "ca", "ssl_cert": "cert", "ssl_key": "key"}
# Codes of the server and of the driver; a part of the protocol.
_DENIED: Final = {1044, 1045, 1142, 1227, 1698}
_NO_DATABASE: Final = 1049
_LOG_GONE: Final = 1236
_UNREACHABLE: Final = {1040, 1053, 1077, 1152, 1158, 1159, 1160, 1161, 1205, 1927}
_DRIVER: Final = 2000  # from here on codes are of the driver: the connection


@dataclass(frozen=True, slots=True)
class Address:
    """Where a database is and who reads it."""

    host: str
    port: int
    user: str
    password: Secret
    database: str
    tls: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str) -> Address:
        """From mysql://user:password@host:port/database, with ?ssl_ca=FILE for TLS."""
        shown = hide_password(url)
        try:
            parts = urlsplit(url)
            port = parts.port or 3306
        except ValueError as error:
            raise errors.ConfigError(f"source: {shown!r} is not an address: {error}") from None
        database = unquote(parts.path.removeprefix("/"))
        if not parts.hostname or not parts.username or not database or "/" in database:
            raise errors.ConfigError(
                f"source: {shown!r} lacks a part. Write mysql://user:password@host:port/database"
            )
        tls = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name not in _OPTIONS:
                raise errors.ConfigError(
                    f"source: '{name}' is not an option of MySQL; there are {', '.join(_OPTIONS)}"
                )
            tls[_OPTIONS[name]] = value
        return cls(
            parts.hostname,
            port,
            unquote(parts.username),
            Secret(unquote(parts.password or "")),
            database,
            tls,
        )

    def options(self) -> dict[str, Any]:
        """For the driver."""
        found: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "password": self.password.reveal(),
            "charset": "utf8mb4",
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "write_timeout": READ_SECONDS,
            "autocommit": True,
        }
        return {**found, "ssl": dict(self.tls)} if self.tls else found


def connect(address: Address, **changed: Any) -> Any:
    """A connection to the database; blocks."""
    pymysql = needed("pymysql", "cdc")
    options = {**address.options(), "database": address.database, **changed}
    return pymysql.connect(**options)


def error_of(error: Exception, capture: str, address: Address) -> errors.MillstreamError:
    """What an error of the driver means."""
    code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    text = error.args[1] if len(error.args) > 1 else str(error)
    where = f"{address.host}:{address.port}"
    if code in _DENIED:
        return errors.ConfigError(
            f"source: {where} refused user '{address.user}': {text}. Check user, password and "
            f"grants: 'millstream cdc check' lists what is missing"
        )
    if code == _NO_DATABASE:
        return errors.ConfigError(f"source: {where} has no database '{address.database}'")
    if code == _LOG_GONE:
        return errors.SourceLost(capture, f"the server cannot give the log from there ({text})")
    if code in _UNREACHABLE or code >= _DRIVER or code == 0:
        return errors.SourceUnreachable(f"source: no connection to {where}: {text}")
    return errors.CaptureError(f"source: {where} answered with error {code}: {text}")
