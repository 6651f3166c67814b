"""A connection to the broker as one user: it proves the password, and asks what the user may do.

The server closes it as soon as it accepts the user or its password no longer. It is a bare link
that does not connect again, because then there must be a new proof.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import msgspec

from millstream.deadline import Deadline
from millstream.errors import (
    AuthenticationFailed,
    ConnectError,
    ConnectFailed,
    PermissionDenied,
    RequestTimeout,
)
from millstream.gateways.rights import Rights, rights_from_answer
from millstream.settings import ConnectionSettings, Secret
from millstream.wire.aio.link import Link, open_link
from millstream.wire.handshake import ServerInfo, denied_subject, parse_address
from millstream.wire.protocol import pub, sub, unique_token
from millstream.wire.tls import worst_of

__all__ = ["WHO_AM_I", "UserLink", "as_user", "rights_in"]

_log = logging.getLogger("millstream.gateways")

WHO_AM_I: Final = "$SYS.REQ.USER.INFO"
SERVER_SECONDS: Final = 2.0  # for each server of several, so that one that hangs does not take all
CLOSE_SECONDS: Final = 2.0
_SID: Final = b"1"


class _Answer(msgspec.Struct):
    data: dict[str, Any] | None = None


def as_user(
    settings: ConnectionSettings, name: str, user: str | None, password: Secret | None
) -> ConnectionSettings:
    """The settings of a connection, with this login (None: without one) instead of its own."""
    return replace(
        settings,
        name=name,
        user=user,
        password=password,
        token=None,
        nkey_seed=None,
        creds=None,
    )


def rights_in(answer: bytes) -> Rights:
    """The rights in the server's answer to `WHO_AM_I`."""
    try:
        data = msgspec.json.decode(answer, type=_Answer).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConnectError(f"the server's answer on {WHO_AM_I} is not readable") from error
    if data is None:
        raise ConnectError(f"the server did not answer on {WHO_AM_I}")
    return rights_from_answer(data)


class UserLink:
    """One such connection; open it once."""

    def __init__(self, when_lost: Callable[[], None] | None = None) -> None:
        self._when_lost = when_lost  # called if it is lost, not if we close it
        self._link: Link | None = None
        self._inbox = b""
        self._asked: asyncio.Future[bytes] | None = None

    @property
    def up(self) -> bool:
        """Whether the server accepts the user still, as far as known."""
        return self._link is not None and not self._link.lost

    async def open(self, settings: ConnectionSettings, timeout: float) -> None:
        """Connect to the first server that answers; AuthenticationFailed if it refuses the login.

        A login in an address is left out: it is that of somebody else.
        """
        deadline = Deadline(timeout)
        alone = len(settings.urls) == 1
        errors: list[ConnectError] = []
        for url in settings.urls:
            address = replace(parse_address(url), user=None, password=None)
            share = Deadline(deadline.left(at_most=None if alone else SERVER_SECONDS))
            try:
                self._link = await open_link(address, settings, self._make, share)
            except AuthenticationFailed:
                raise
            except ConnectError as error:
                errors.append(error)
                continue
            self._inbox = f"{settings.inbox_prefix}.{unique_token()}".encode()
            self._link.write(sub(self._inbox, b"", _SID))
            return
        raise worst_of(errors)

    async def rights(self, timeout: float) -> Rights:
        """Ask what the user may do now; PermissionDenied if it may not even ask that."""
        if self._link is None or self._link.lost:
            raise ConnectFailed("the connection of the user is lost")
        asked = self._asked
        if asked is None:
            asked = self._asked = asyncio.get_running_loop().create_future()
            asked.add_done_callback(self._answered)
            self._link.write(pub(WHO_AM_I.encode(), self._inbox, b""))
        try:
            async with asyncio.timeout(timeout):
                answer = await asyncio.shield(asked)
        except TimeoutError as error:
            raise RequestTimeout(WHO_AM_I, timeout) from error
        return rights_in(answer)

    async def close(self) -> None:
        """Close it."""
        self._when_lost = None
        link, self._link = self._link, None
        self._fail(ConnectFailed("the connection of the user was closed"))
        if link is not None:
            link.close()
            await link.wait_closed(CLOSE_SECONDS)

    def _make(self) -> Link:
        return Link({_SID: self._reply}, {}, self)

    def _answered(self, future: asyncio.Future[bytes]) -> None:
        self._asked = None
        if not future.cancelled():
            future.exception()  # seen: whoever asked may have given up

    def _reply(self, _subject: bytes, _reply: bytes, _headers: bytes, payload: bytes) -> None:
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(payload)

    def _fail(self, error: Exception) -> None:
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(error)

    # -- called by the link -------------------------------------------------------------------

    def link_lost(self, _link: Link, error: Exception | None) -> None:
        """The server closed it, or cannot be reached."""
        self._fail(ConnectFailed(f"the connection of the user was lost: {error}"))
        if self._when_lost is not None:
            self._when_lost()

    def link_error(self, text: str) -> None:
        """The server refused something."""
        denied: PermissionDenied | None = denied_subject(text)
        if denied is not None:
            self._fail(denied)
        else:
            _log.debug("the broker says to a user's connection: %s", text)

    def link_info(self, info: ServerInfo) -> None:
        """The server says something about itself; nothing of it matters here."""

    def link_congested(self, _link: Link, _congested: bool) -> None:
        """It never sends more than a question at a time."""
