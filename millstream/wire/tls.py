"""TLS of a client: whom it trusts, and what to say when a connection cannot be secured.

Shared by both clients, so that the same words name the same missing setting everywhere.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from millstream.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectError,
    ConnectFailed,
    TlsFailed,
)
from millstream.settings import Tls
from millstream.wire.handshake import ServerAddress, ServerInfo

__all__ = ["check_tls", "no_answer", "open_failure", "tls_context", "worst_of"]

# OpenSSL's codes of a certificate that was not accepted (X509_V_ERR_...).
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_WRONG_NAME: Final = frozenset({62, 64})  # host name, IP address
_CLOSED: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # the connection is lost, no more
_CLIENT_FILES: Final = "NATS_CERT and NATS_KEY, Tls(cert=..., key=...), in Spark tlsCert and tlsKey"


def tls_context(tls: Tls | None) -> ssl.SSLContext:
    """A client context that verifies the server.

    By `pin` only the holder of that very certificate is accepted, under any name and whoever
    signed it; else the given or the system's authorities must have signed one for the host.
    """
    tls = tls or Tls()
    try:
        if tls.pin is None:
            context = ssl.create_default_context(cafile=tls.ca)
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False  # its key proves who it is, whatever names it has
            context.load_verify_locations(cadata=_first_certificate(tls.pin))
        # A listed certificate is trusted itself, also if it is no authority (as by Go's clients).
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ValueError) as error:  # also ssl.SSLError
        files = ", ".join(file for file in (tls.pin, tls.ca, tls.cert, tls.key) if file)
        raise ConfigError(f"cannot use the TLS files {files}: {error}") from error
    return context


def _first_certificate(file: str) -> str:
    """The server's own certificate; those after it are of authorities, which may sign others."""
    mark = "-----END CERTIFICATE-----"
    text = Path(file).read_text(encoding="ascii")
    begin, end = text.find("-----BEGIN CERTIFICATE-----"), text.find(mark)
    if not 0 <= begin < end:
        raise ValueError(f"{file} has no certificate")
    return text[begin : end + len(mark)]


def check_tls(address: ServerAddress, tls: Tls | None, info: ServerInfo) -> None:
    """Before TLS starts: refuse what the server's greeting shows to be impossible."""
    if not (info.tls_required or info.tls_available):
        asked = "the address has tls://" if address.tls else "a certificate or authority is set"
        raise TlsFailed(
            f"{address} does not use TLS, but {asked}. Use nats://, without NATS_CA, NATS_CERT and "
            f"NATS_KEY (Tls), or start the broker with --tls-cert and --tls-key"
        )
    if info.tls_verify and (tls is None or tls.cert is None):
        raise TlsFailed(
            f"{address} requires a certificate of every client, and none is set. "
            f"Give one that it trusts, and its key: {_CLIENT_FILES}"
        )


def no_answer(
    address: ServerAddress, tls: Tls | None, info: ServerInfo, seconds: float
) -> ConnectFailed:
    """The error when the time is up; a server that wants TLS first waits for it silently."""
    if info.server_id or (tls is not None and tls.handshake_first):
        return ConnectFailed(f"{address} did not answer within {seconds:.3g} s")
    return ConnectFailed(
        f"{address} did not greet within {seconds:.3g} s. If it was started with --tls-first, set "
        f"NATS_TLS_FIRST=1 or Tls(handshake_first=True), in Spark tlsFirst"
    )


def open_failure(
    error: Exception, address: ServerAddress, tls: Tls | None, info: ServerInfo
) -> ConnectError:
    """What to raise when opening a connection failed with this error."""
    cause = error if isinstance(error, ssl.SSLError) else error.__cause__
    if isinstance(cause, ssl.SSLError) and not isinstance(cause, _CLOSED):
        return _tls_failure(cause, address, tls, info)
    if isinstance(error, AuthenticationFailed | TlsFailed):
        return error
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if info.tls_verify and tls is not None:  # its refusal can get lost when it closes
        return ConnectFailed(
            f"cannot connect to {address}: {why}. It checks the certificates of clients: does it "
            f"trust {tls.cert}?"
        )
    if isinstance(error, ConnectError):
        return error
    if isinstance(error, ConnectionRefusedError):  # asyncio's text repeats the address
        why = "connection refused"
    return ConnectFailed(
        f"cannot connect to {address}: {why}. "
        f"Start a broker with 'millstream up', or check the address"
    )


def _tls_failure(
    error: ssl.SSLError, address: ServerAddress, tls: Tls | None, info: ServerInfo
) -> TlsFailed:
    tls = tls or Tls()
    reason = getattr(error, "reason", None) or str(error)  # Python sets it late
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsFailed(f"the certificate of {address} {_distrust(error, address, tls)}")
    if "CERTIFICATE_REQUIRED" in reason:
        return TlsFailed(
            f"{address} requires a certificate of every client. "
            f"Give one that it trusts, and its key: {_CLIENT_FILES}"
        )
    if "ALERT" in reason and tls.cert:
        return TlsFailed(
            f"{address} does not accept the certificate {tls.cert} of this client ({reason}). "
            f"Give one that it trusts, and its key: {_CLIENT_FILES}"
        )
    if tls.handshake_first and not info.server_id:
        return TlsFailed(
            f"{address} does not start with TLS ({reason}), but TLS first is set. Unset "
            f"NATS_TLS_FIRST (Tls.handshake_first, in Spark tlsFirst), or start the broker with "
            f"--tls-first"
        )
    return TlsFailed(f"TLS with {address} failed: {reason}")


def _distrust(error: ssl.SSLCertVerificationError, address: ServerAddress, tls: Tls) -> str:
    if error.verify_code == _EXPIRED:
        return "has expired. Renew it on the server and restart or reload the broker"
    if error.verify_code == _NOT_YET_VALID:
        return "is not valid yet. Check the clocks of both machines"
    if error.verify_code in _WRONG_NAME:
        return (
            f"is not for '{address.host}': the server has another name there, or is another "
            f"one. Connect to a name in its certificate"
        )
    why = error.verify_message
    if tls.pin is not None:
        return (
            f"is not the one in {tls.pin} ({why}). If that file was replaced, restart the broker; "
            f"else another server answers there"
        )
    if tls.ca is not None:
        return (
            f"is not signed by an authority in {tls.ca} ({why}). Name the file of the authority "
            f"that signed it: NATS_CA, Tls(ca=...), in Spark tlsCa"
        )
    return (
        f"is signed by an unknown authority ({why}). Name the authority's file, or that of a "
        f"self-signed certificate: NATS_CA, Tls(ca=...), in Spark tlsCa"
    )


def worst_of(errors: Sequence[ConnectError]) -> ConnectError:
    """The error when no server of a list could be used: what must be corrected comes first."""
    refused = [e for e in errors if isinstance(e, AuthenticationFailed | TlsFailed)]
    if refused:
        return refused[0]
    if len(errors) == 1:
        return errors[0]
    return ConnectFailed("no server could be reached: " + "; ".join(map(str, errors)))
