"""Settings that gateways of all protocols share: addresses, TLS, logins, limits.

Each setting is declared once, as a field. The options of `millstream gateway run`, the keys of
millstream.toml, the environment variables and the tables of the documentation come from the
declarations. A protocol adds its own settings in a class that inherits from this one.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from millstream.broker.checks import check_host, check_name, check_port, is_loopback
from millstream.declared import Declaration, Form, declared
from millstream.errors import ConfigError
from millstream.settings import hold_seconds

__all__ = ["LIMITS", "SECURITY", "GatewaySettings", "split_address"]

# Headings of the options.
SECURITY: Final = "Security"
LIMITS: Final = "Limits"

_MEBIBYTE: Final = 1024 * 1024
_ALL_ADDRESSES: Final = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Everything about one gateway that is not particular to its protocol."""

    name: str = declared(
        "gateway", Declaration("Name of the gateway; only one of a name runs at a time.")
    )
    host: str = declared(
        "127.0.0.1",
        Declaration("Address to listen on; any other than loopback needs --auth."),
    )
    port: int = declared(0, Declaration("Port to listen on; 0 for any free port.", Form.NUMBER))
    advertise: str | None = declared(
        None,
        Declaration(
            "Address that clients are asked to connect to: how they reach this gateway.",
            metavar="HOST[:PORT]",
            default_text="that of --host and --port",
        ),
    )
    auth: bool | None = declared(
        None,  # None: if the broker asks for a login; `serve_gateway` decides
        Declaration(
            "Clients must log in as a user of the broker.",
            Form.SWITCH,
            SECURITY,
            flags=("--auth/--no-auth",),
            default_text="if the broker has users",
        ),
    )
    tls_cert: Path | None = declared(
        None, Declaration("Certificate file; clients then connect with TLS.", Form.FILE, SECURITY)
    )
    tls_key: Path | None = declared(None, Declaration("Private key file.", Form.FILE, SECURITY))
    max_connections: int = declared(
        16_384, Declaration("Maximum number of connections.", Form.NUMBER, LIMITS)
    )
    max_frame: int = declared(
        16 * _MEBIBYTE, Declaration("Maximum size of a request.", Form.SIZE, LIMITS)
    )
    max_connection_bytes: int = declared(
        32 * _MEBIBYTE,
        Declaration(
            "Size of the requests of one connection that are in progress; beyond it the "
            "connection is not read. One request always fits.",
            Form.SIZE,
            LIMITS,
        ),
    )
    max_bytes: int = declared(
        256 * _MEBIBYTE,
        Declaration(
            "Size of requests in progress and of answers that were not read yet, of all "
            "connections; beyond it requests wait.",
            Form.SIZE,
            LIMITS,
        ),
    )
    frame_timeout: float = declared(
        30.0,
        Declaration(
            "How long a request may take to arrive; then the connection is closed.",
            Form.DURATION,
            LIMITS,
        ),
    )
    write_timeout: float = declared(
        30.0,
        Declaration(
            "How long a client may not read its answers; then the connection is closed.",
            Form.DURATION,
            LIMITS,
        ),
    )
    idle_timeout: float = declared(
        600.0,
        Declaration(
            "How long a connection may be without a request; then it is closed.",
            Form.DURATION,
            LIMITS,
        ),
    )
    stop_grace: float = declared(
        2.0,  # less than the keeper of a broker waits for the processes that it ends
        Declaration(
            "How long requests in progress may take when the gateway is stopped.",
            Form.DURATION,
            LIMITS,
        ),
    )

    def __post_init__(self) -> None:
        hold_seconds(self, "frame_timeout", "write_timeout", "idle_timeout", "stop_grace")
        check_name("gateway", self.name)
        check_host(self.host)
        check_port("port", self.port)
        for item in fields(self):
            value = getattr(self, item.name)
            limit = item.name.startswith("max_") or item.name.endswith("_timeout")
            if limit and value <= 0:
                raise ConfigError(f"{item.name} must be above 0, not {value}")
        if self.max_frame > self.max_bytes:
            raise ConfigError(
                f"max_frame is {self.max_frame:,} bytes, more than max_bytes, {self.max_bytes:,}: "
                f"such a request would never fit"
            )
        self._check_addresses()
        self._check_tls()

    def _check_addresses(self) -> None:
        if not is_loopback(self.host) and not self.auth:
            raise ConfigError(
                f"listening on {self.host} opens the gateway to the network without a password. "
                f"Require a login (--auth), or listen on 127.0.0.1"
            )
        if self.advertise is not None:
            host, port = split_address(self.advertise)
            check_host(host)
            check_port("advertise", port or 0)
            if host in _ALL_ADDRESSES:
                raise ConfigError(
                    f"advertise: clients cannot connect to {host}. Give the host name or address "
                    f"by which they reach this machine"
                )
        elif self.host in _ALL_ADDRESSES:
            raise ConfigError(
                f"a gateway that listens on {self.host} does not know by which address clients "
                f"reach it: give --advertise HOST[:PORT]"
            )

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both --tls-cert FILE and --tls-key FILE")
        for name in ("tls_cert", "tls_key"):
            file = getattr(self, name)
            if file is not None:
                object.__setattr__(self, name, Path(file).absolute())
                if not Path(file).is_file():
                    raise ConfigError(f"TLS: there is no file {file}")

    @property
    def tls(self) -> bool:
        """Whether clients connect with TLS."""
        return self.tls_cert is not None

    def advertised(self, port: int) -> tuple[str, int]:
        """Host and port that clients are sent to, given the port that it listens on."""
        if self.advertise is None:
            return self.host, port
        host, own = split_address(self.advertise)
        return host, own or port

    def tls_context(self) -> ssl.SSLContext | None:
        """The certificate, ready for a listener; None without TLS."""
        if self.tls_cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"TLS: {self.tls_cert} and {self.tls_key} are no certificate with its key: {error}"
            ) from error
        return context


def split_address(text: str) -> tuple[str, int | None]:
    """Host and port of HOST, HOST:PORT, [IPV6] or [IPV6]:PORT; the port is None if not given.

    >>> split_address("mill.example.org:9092"), split_address("[::1]:9092"), split_address("::1")
    (('mill.example.org', 9092), ('::1', 9092), ('::1', None))
    """
    host, colon, port = text.rpartition(":")
    if text.startswith("["):
        inside, _, rest = text[1:].partition("]")
        host, colon, port = inside, rest[:1], rest[1:]
    elif not colon or ":" in host:  # a name, or an IPv6 address without brackets
        return text, None
    if not colon:
        return host, None
    if colon != ":" or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65_536:
        raise ConfigError(f"{text!r} is not an address: write HOST or HOST:PORT")
    return host, int(port)
