"""The names in a server's certificate."""

from __future__ import annotations

import contextlib
import ssl
from typing import Any, Final

from millstream.broker.config import ServerTls

__all__ = ["certificate_names"]

_STEPS: Final = 8  # of each side; a handshake takes three


def certificate_names(tls: ServerTls) -> tuple[str, ...]:
    """Hosts and addresses that a server's certificate is for; none if it is not valid now.

    Python shows the content of a certificate only to a client that has verified it, so client and
    server shake hands in memory here.
    """
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(tls.cert, tls.key, password=lambda: b"")  # never ask on a terminal
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client.load_verify_locations(tls.cert)
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        asking = client.wrap_bio(back, there)
        answering = server.wrap_bio(there, back, server_side=True)
        for _ in range(_STEPS):
            for side in (asking, answering):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        found = asking.getpeercert() or {}
    except (OSError, ValueError):  # also ssl.SSLError; the server will report what is wrong
        return ()
    names: Any = found.get("subjectAltName", ())
    return tuple(value for kind, value in names if kind in ("DNS", "IP Address"))
