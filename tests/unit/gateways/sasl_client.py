"""A client's side of SCRAM, written for the tests."""

from __future__ import annotations

import base64
import hashlib
import hmac

from millstream.gateways.scram import SCRAM_HASHES

__all__ = ["ScramClient"]


class ScramClient:
    """One login: sends `first`, then `final`, then checks the server."""

    def __init__(self, mechanism: str, user: str, password: str, header: str = "n,,") -> None:
        self.name = SCRAM_HASHES[mechanism]
        self.password = password.encode()
        self.header = header
        self.bare = f"n={user},r=fyko+d2lbbFgONRv9qkxdawL"

    @property
    def first(self) -> bytes:
        return (self.header + self.bare).encode()

    def final(self, challenge: bytes) -> bytes:
        fields = dict(part.split("=", 1) for part in challenge.decode().split(","))
        salt, iterations = base64.b64decode(fields["s"]), int(fields["i"])
        self.salted = hashlib.pbkdf2_hmac(self.name, self.password, salt, iterations)
        client = hmac.digest(self.salted, b"Client Key", self.name)
        stored = hashlib.new(self.name, client).digest()
        channel = base64.b64encode(self.header.encode()).decode()
        unproven = f"c={channel},r={fields['r']}"
        self.signed = f"{self.bare},{challenge.decode()},{unproven}".encode()
        signature = hmac.digest(stored, self.signed, self.name)
        proof = bytes(a ^ b for a, b in zip(client, signature, strict=True))
        return f"{unproven},p={base64.b64encode(proof).decode()}".encode()

    def trusts(self, answer: bytes) -> bool:
        server = hmac.digest(self.salted, b"Server Key", self.name)
        signature = hmac.digest(server, self.signed, self.name)
        return answer == b"v=" + base64.b64encode(signature)
