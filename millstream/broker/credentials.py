"""Names and passwords the broker makes by itself, kept in a file only the owner can read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream.broker.config import DEFAULT_ACCOUNT, Role
from millstream.settings import Secret

__all__ = ["Credentials", "read_credentials"]


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user to connect as."""

    user: str
    password: Secret
    role: str  # "admin", "app", "reader", or "system" for the $SYS account
    account: str


def read_credentials(
    data: Path, role: Role | str = Role.APP, account: str = DEFAULT_ACCOUNT
) -> Credentials:
    """The generated user of that role and account; role "system" is the $SYS user."""
    raise NotImplementedError
