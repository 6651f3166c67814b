"""What one logged-in user may do, for all its connections."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

from millstream.gateways.rights import Rights, TopicSubjects

__all__ = ["Access", "LoginRefused", "LoginUnavailable"]

_log = logging.getLogger("millstream.gateways")

DECISIONS_MAX: Final = 1024  # that are kept of a user, about topics and groups

_Thing = TypeVar("_Thing", bound=Hashable)


class LoginRefused(Exception):
    """A login is not accepted; the text is for the client."""


class LoginUnavailable(Exception):
    """Whether a login is right cannot be found out at the moment; the client should try again."""


class Access:
    """The rights of one logged-in user; kept fresh while connections use it.

    A connection calls `join` after its login and `leave` at its end. Those that have not joined
    count as gone, and learn nothing of a revocation.
    """

    def __init__(self, user: str, rights: Rights) -> None:
        self.user = user  # "" where the gateway asks for no login
        self.revoked = False  # the user was removed, or its password changed
        self._rights = rights
        self._known: dict[tuple[str, Hashable], bool] = {}
        self._connections: set[Callable[[str], None]] = set()

    def __repr__(self) -> str:
        return f"Access({self.user!r})"

    @property
    def rights(self) -> Rights:
        """The present ones."""
        return self._rights

    @property
    def in_use(self) -> bool:
        """Whether there are connections with it."""
        return bool(self._connections)

    def join(self, close: Callable[[str], None]) -> None:
        """Have `close` called, with a reason, when the login is revoked."""
        self._connections.add(close)

    def leave(self, close: Callable[[str], None]) -> None:
        """The connection is closed."""
        self._connections.discard(close)

    def may_read(self, topic: TopicSubjects) -> bool:
        """Whether the user may read a topic."""
        return self._may("read", topic, self._rights.may_read)

    def may_write(self, topic: TopicSubjects) -> bool:
        """Whether it may publish to a topic."""
        return self._may("write", topic, self._rights.may_write)

    def may_manage(self, topic: TopicSubjects) -> bool:
        """Whether it may delete a topic, its events, or change its settings."""
        return self._may("manage", topic, self._rights.may_manage)

    def may_create(self, topic: str) -> bool:
        """Whether it may create a topic of this name."""
        return self._may("create", topic, self._rights.may_create)

    def may_join(self, group: str) -> bool:
        """Whether it may be a member of a group."""
        return self._may("join", group, self._rights.may_join)

    def _may(self, deed: str, what: _Thing, decide: Callable[[_Thing], bool]) -> bool:
        if self.revoked:
            return False
        if self._rights.unlimited:
            return True
        key = deed, what
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= DECISIONS_MAX:
                self._known.clear()
            known = self._known[key] = decide(what)
        return known

    # -- for Logins ---------------------------------------------------------------------------

    def update(self, rights: Rights) -> None:
        """Take what the broker says now."""
        if rights != self._rights:
            self._rights = rights
            self._known.clear()

    def revoke(self, reason: str) -> None:
        """End its connections."""
        self.revoked = True
        while self._connections:
            close = self._connections.pop()
            try:
                close(reason)
            except Exception:
                _log.exception("a connection of user %r was not closed", self.user)
