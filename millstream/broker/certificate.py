"""The names in a server's certificate, and who vouches for it."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path
from typing import Any, Final

from millstream.broker.config import ServerTls

__all__ = ["certificate_names", "trusted_file"]

_STEPS: Final = 8  # of each side; a handshake takes three


def certificate_names(tls: ServerTls) -> tuple[str, ...]:
    """Hosts and addresses that a server's certificate is for; none if it is not valid now."""
    names: Any = _as_a_client_sees_it(tls, tls.cert).get("subjectAltName", ())
    return tuple(value for kind, value in names if kind in ("DNS", "IP Address"))


def trusted_file(tls: ServerTls) -> Path:
    """What clients should trust: the authority if it signed the certificate, else the latter.

    The other nodes of a cluster have certificates of their own, which only the authority vouches
    for.
    """
    by_authority = tls.ca is not None and _as_a_client_sees_it(tls, tls.ca)
    return tls.ca if by_authority and tls.ca is not None else tls.cert


def _as_a_client_sees_it(tls: ServerTls, trusted: Path) -> dict[str, Any]:
    """The content of a server's certificate; nothing if a client that trusts the file refuses it.

    Python shows it only to a client that has verified it, so client and server shake hands in
    memory here.
    """
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(tls.cert, tls.key, password=lambda: b"")  # never ask on a terminal
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client.load_verify_locations(trusted)
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        asking = client.wrap_bio(back, there)
        answering = server.wrap_bio(there, back, server_side=True)
        for _ in range(_STEPS):
            for side in (asking, answering):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        return asking.getpeercert() or {}
    except (OSError, ValueError):  # also ssl.SSLError; the server will report what is wrong
        return {}
