"""Signed claims of operator mode: operators, accounts and users as JWTs. Pure.

operator, account, user = new_key("operator"), new_key("account"), new_key("user")
sign(account_claims(account.public, "acme"), operator)      # for the resolver
creds_text(sign(user_claims(user.public, "ann"), account), user.seed)    # for the client
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any, Final

from millstream.deadline import now_ns
from millstream.errors import ConfigError
from millstream.settings import Secret

__all__ = [
    "SigningKey",
    "account_claims",
    "creds_text",
    "new_key",
    "operator_claims",
    "read_claims",
    "read_key",
    "sign",
    "user_claims",
]

_HEADER: Final = {"typ": "JWT", "alg": "ed25519-nkey"}
_VERSION: Final = 2  # of the claims
_UNLIMITED: Final = -1
_KINDS: Final = {"operator": "O", "account": "A", "user": "U"}


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key pair of an operator, account or user."""

    public: str
    seed: Secret


def new_key(kind: str) -> SigningKey:
    """A new key pair of an "operator", "account" or "user"."""
    import nkeys  # loaded only where a key is used: it brings a cryptography library

    prefix = getattr(nkeys, f"PREFIX_BYTE_{kind.upper()}")
    seed: bytes = nkeys.encode_seed(os.urandom(32), prefix)
    return SigningKey(nkeys.from_seed(seed).public_key.decode(), Secret(seed.decode()))


def read_key(seed: Secret) -> SigningKey:
    """The key pair of a seed (SO..., SA... or SU...)."""
    import nkeys

    try:
        return SigningKey(nkeys.from_seed(seed.reveal().encode()).public_key.decode(), seed)
    except Exception as error:  # nkeys raises its own and binascii's errors
        raise ConfigError("not the seed of a key (it starts with SA for an account)") from error


def operator_claims(subject: str, name: str, system_account: str) -> dict[str, Any]:
    """Claims of an operator whose server has this system account."""
    return _claims(subject, name, "operator", {"system_account": system_account})


def account_claims(subject: str, name: str, *, jetstream: bool = True) -> dict[str, Any]:
    """Claims of an account without limits of its own."""
    unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports"), _UNLIMITED)
    limits: dict[str, Any] = {
        **unlimited,
        "wildcards": True,
        "conn": _UNLIMITED,
        "leaf": _UNLIMITED,
    }
    if jetstream:
        limits |= dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), _UNLIMITED)
    return _claims(subject, name, "account", {"limits": limits})


def user_claims(
    subject: str,
    name: str,
    *,
    publish: tuple[str, ...] = (),
    publish_deny: tuple[str, ...] = (),
    bearer: bool = False,
) -> dict[str, Any]:
    """Claims of a user; no subjects: all. A bearer needs no key: who has the JWT is the user."""
    facts: dict[str, Any] = dict.fromkeys(("subs", "data", "payload"), _UNLIMITED)
    rules = {"allow": list(publish), "deny": list(publish_deny)}
    facts |= {"pub": {name: rule for name, rule in rules.items() if rule}, "sub": {}}
    return _claims(subject, name, "user", {**facts, "bearer_token": bearer})


def _claims(subject: str, name: str, kind: str, facts: dict[str, Any]) -> dict[str, Any]:
    if not subject.startswith(_KINDS[kind]):
        raise ConfigError(f"{subject[:4]!r}... is not the public key of {kind} '{name}'")
    nats = {**facts, "type": kind, "version": _VERSION}
    return {"sub": subject, "name": name, "iat": now_ns() // 1_000_000_000, "nats": nats}


def sign(claims: dict[str, Any], key: SigningKey) -> str:
    """The JWT with these claims, issued by the key: accounts by the operator, users by accounts."""
    import nkeys

    content = {**claims, "iss": key.public}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
    content["jti"] = base64.b32encode(digest).decode().rstrip("=")
    text = f"{_part(_HEADER)}.{_part(content)}"
    signature: bytes = nkeys.from_seed(key.seed.reveal().encode()).sign(text.encode())
    return f"{text}.{_encoded(signature)}"


def read_claims(token: str) -> dict[str, Any]:
    """The claims in a JWT; its signature is for the server to check."""
    try:
        body = token.strip().split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (IndexError, ValueError) as error:
        raise ConfigError(f"not a JWT of NATS: {error}") from error
    if not isinstance(claims, dict) or "nats" not in claims or "sub" not in claims:
        raise ConfigError("not a JWT of NATS: it has no claims of NATS")
    return claims


def creds_text(token: str, seed: Secret) -> str:
    """The content of a .creds file, as clients and the `nats` tool read it."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed.reveal()}\n------END USER NKEY SEED------\n"
    )


def _part(content: dict[str, Any]) -> str:
    return _encoded(json.dumps(content, separators=(",", ":")).encode())


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
