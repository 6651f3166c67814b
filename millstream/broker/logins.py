"""Settings of logins that others define: operator mode and auth callout."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from millstream.broker.checks import is_public_key
from millstream.broker.users import DEFAULT_ACCOUNT
from millstream.declared import Declaration, Form, declares
from millstream.errors import ConfigError

__all__ = ["SECURITY", "AuthCallout", "OperatorSettings"]

SECURITY: Final = "Security"  # heading of the options


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """Operator mode: accounts and users are JWTs that an operator has signed.

    The server holds no users of its own then; clients log in with creds files.
    """

    jwt: Path = field(
        metadata=declares(
            Declaration(
                "File with the JWT of the operator: accounts and users are then JWTs too.",
                Form.FILE,
                SECURITY,
                name="operator_jwt",
            )
        )
    )
    accounts: Path = field(
        metadata=declares(
            Declaration(
                "File with the JWTs of the accounts, one on each line.",
                Form.FILE,
                SECURITY,
                name="account_jwts",
            )
        )
    )
    system_creds: Path = field(
        metadata=declares(
            Declaration(
                "Creds file of a bearer user of the system account, to read the server's health.",
                Form.FILE,
                SECURITY,
                name="system_creds",
            )
        )
    )

    def __post_init__(self) -> None:
        for name in ("jwt", "accounts", "system_creds"):
            file = Path(getattr(self, name)).absolute()
            object.__setattr__(self, name, file)
            if not file.is_file():
                raise ConfigError(f"operator mode: there is no file {file}")


@dataclass(frozen=True, slots=True)
class AuthCallout:
    """A service of yours that decides about logins, besides the users of the broker."""

    issuer: str = field(
        metadata=declares(
            Declaration(
                "Public key (A...) that signs the answers of your service that decides about "
                "logins (auth callout).",
                group=SECURITY,
                name="callout_issuer",
            )
        )
    )
    account: str = field(
        metadata=declares(
            Declaration(
                "Account whose users answer the callout; they see the passwords of everyone who "
                "logs in.",
                group=SECURITY,
                name="callout_account",
            )
        )
    )

    def __post_init__(self) -> None:
        if not is_public_key("A", self.issuer):
            raise ConfigError(
                "auth callout: the issuer is the public key of an account, which has 56 letters "
                f"and digits and starts with A, not {self.issuer[:4]!r}..."
            )
        if self.account == DEFAULT_ACCOUNT:
            raise ConfigError(
                f"auth callout: all users of the account '{self.account}' would see the passwords "
                f"of everyone who logs in. Give your service an account of its own "
                f"(--account logins --callout-account logins)"
            )
