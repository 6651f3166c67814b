"""Logins at a gateway, and what its clients may do: the users of the broker decide.

A password is proved by a connection to the broker as its user (`UserLink`). It lasts as long as
connections of the user do, because over it the broker says what the user may do, and by closing it
that the login is not accepted any more. All connections that log in with the same user and
password share it, so that 10,000 of them make one connection to the broker. Passwords are not
kept, but a salted hash of them; only while connections of a user are open, also the password, for
the case that the connection to the broker must be made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from millstream.broker.checks import is_loopback
from millstream.deadline import Deadline
from millstream.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectError,
    MillstreamError,
    PermissionDenied,
    RequestTimeout,
)
from millstream.failure_log import FailureLog
from millstream.gateways.folder_passwords import FolderPasswords
from millstream.gateways.rights import Rights, base_account
from millstream.gateways.scram import PLAIN, SCRAM_HASHES, WRONG_LOGIN, Verifier
from millstream.gateways.settings import GatewaySettings
from millstream.gateways.user_access import Access, LoginRefused, LoginUnavailable
from millstream.gateways.user_link import WHO_AM_I, UserLink, as_user, rights_in
from millstream.mill import Mill
from millstream.settings import ConnectionSettings, Secret

__all__ = ["FAILURE_SECONDS", "Access", "LoginRefused", "LoginUnavailable", "Logins"]

_log = logging.getLogger("millstream.gateways")

USERS_MAX: Final = 1024  # that are logged in at once; each takes a connection to the broker
CHECKS_AT_ONCE: Final = 16  # logins that the broker, or a thread, is asked about
LOOKS_AT_ONCE: Final = 32  # users whose rights it is asked about
LOOK_SECONDS: Final = 3.0  # between questions about the rights of a user
SOON_SECONDS: Final = 0.5  # after a connection was lost, or a login refused that was accepted
REFUSALS_MAX: Final = 3  # one after the other, of a login that was accepted before
KEPT_SECONDS: Final = 60.0  # after the last connection of a user
FAILURE_SECONDS: Final = 0.5  # until a refusal is answered, whatever its reason
FAILURES_AT_ONCE: Final = 16
FAILURE_STEP: Final = 0.1  # so all clients together have 160 wrong guesses a second


class _Login:
    """A user that is logged in, with one password."""

    def __init__(self, access: Access, link: UserLink, password: Secret) -> None:
        self.access = access
        self.link = link
        self.password: Secret | None = password  # None: it was not needed for a while
        self.refusals = 0
        self.unused_since: float | None = None


class _Check:
    """A login that is being checked, once for all connections that wait for it."""

    def __init__(self, task: asyncio.Task[Access]) -> None:
        self.task = task
        self.waiting = 0


class Logins:
    """Decides about the logins at one gateway; see the module."""

    def __init__(self, mill: Mill, settings: GatewaySettings, data: Path | None = None) -> None:
        """`data` is the data folder of the broker, where it is on this machine."""
        self.required = settings.auth is not False  # whether clients must log in; see `start`
        self.mechanisms: tuple[str, ...] = ()  # that are on offer
        self._mill = mill
        self._settings = settings
        self._folder = None if data is None else FolderPasswords(data)
        self._account = ""  # of the topics that this gateway serves
        self.own = Rights("", "")  # what the gateway itself may do; see `start`
        self._salt = secrets.token_bytes(32)
        self._logins: dict[tuple[str, bytes], _Login] = {}  # by user, and hash of the password
        self._checks: dict[tuple[str, bytes], _Check] = {}
        self._slots = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._looks = asyncio.Semaphore(LOOKS_AT_ONCE)
        self._failing = asyncio.Semaphore(FAILURES_AT_ONCE)
        self._soon = asyncio.Event()  # something happened that is worth a look
        self._watching: asyncio.Task[None] | None = None
        self._failures = FailureLog(_log)

    # -- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find out whether clients must log in, and how they can."""
        self.own = own = await self._own_rights()
        self._account = base_account(own.account, own.user)
        anonymous = await self._accepts(None, None)
        if self._settings.auth is None:
            self.required = not anonymous
        if not self.required:
            return
        if anonymous and await self._accepts(f"nobody-{_token()}", Secret(_token())):
            raise ConfigError(
                "the broker accepts any user and password, so a login at the gateway would prove "
                "nothing. Start the broker with users (millstream up --auth), or the gateway "
                "without logins (--no-auth)"
            )
        self.mechanisms = await self._offered()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Forget all logins; no connection may need them any more."""
        tasks: list[asyncio.Task[Any]] = [check.task for check in self._checks.values()]
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        links = [login.link.close() for login in self._logins.values()]
        self._logins.clear()
        await asyncio.gather(*links, return_exceptions=True)

    def open_access(self) -> Access:
        """What clients may do at a gateway without logins: what the gateway itself may."""
        return Access("", Rights("", self._account))

    # -- logging in ---------------------------------------------------------------------------

    async def plain(self, user: str, password: Secret) -> Access:
        """The access of a user with this password; LoginRefused, LoginUnavailable."""
        if PLAIN not in self.mechanisms:
            raise LoginRefused("passwords are accepted only over TLS")
        return await self._log_in(user, password)

    async def scram(self, user: str, mechanism: str) -> Verifier:
        """What checks the proof of a user, which may not exist; then call `access_of`."""
        if self._folder is None or mechanism not in self.mechanisms:
            raise LoginRefused(f"{mechanism} is not offered")
        async with self._slots:
            return await asyncio.to_thread(self._folder.verifier, user, mechanism)

    async def access_of(self, user: str, verifier: Verifier) -> Access:
        """The access of a user that gave the proof which the verifier asks."""
        if self._folder is None:
            raise LoginRefused(WRONG_LOGIN)
        password = await asyncio.to_thread(self._folder.password, user, verifier)
        if password is None:  # changed in between
            raise LoginRefused(WRONG_LOGIN)
        return await self._log_in(user, password)

    async def hold_back(self, began: Deadline) -> None:
        """Wait before a refusal is answered; `began` is a deadline of `FAILURE_SECONDS`.

        All refusals take the same time, so that it does not tell the reason; and beyond a rate
        they take longer, so that nobody can try many passwords.
        """
        async with self._failing:
            await asyncio.sleep(FAILURE_STEP)
        await asyncio.sleep(began.left())

    async def _log_in(self, user: str, password: Secret) -> Access:
        key = user, self._hash(user, password)
        login = self._logins.get(key)
        if login is None or not login.link.up:
            return await self._checked(key, password)
        login.password, login.unused_since = password, None
        return login.access

    def _hash(self, user: str, password: Secret) -> bytes:
        text = f"{user}\0{password.reveal()}".encode()
        return hashlib.blake2b(text, key=self._salt, digest_size=32).digest()

    async def _checked(self, key: tuple[str, bytes], password: Secret) -> Access:
        """Wait for the check of a login, which is given up when nobody waits any more."""
        check = self._checks.get(key)
        if check is None:
            check = _Check(asyncio.create_task(self._check(key, password)))
            check.task.add_done_callback(_seen)
            self._checks[key] = check
        check.waiting += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.waiting -= 1
            if not check.waiting:
                check.task.cancel()
                if self._checks.get(key) is check:
                    del self._checks[key]

    async def _check(self, key: tuple[str, bytes], password: Secret) -> Access:
        """Ask the broker whether a login is right."""
        user = key[0]
        async with self._slots:
            link, rights = await self._proved(user, password)
        login = self._logins.get(key)
        if login is not None:  # its connection to the broker had been lost
            await self._replace_link(login, link, rights)
            login.password, login.unused_since = password, None
            return login.access
        try:
            await self._make_room()
        except BaseException:
            await link.close()
            raise
        access = Access(user, rights)
        self._logins[key] = _Login(access, link, password)
        return access

    async def _proved(self, user: str, password: Secret) -> tuple[UserLink, Rights]:
        """A connection to the broker as this user, which proves the password."""
        link = UserLink(self._soon.set)
        login = as_user(self._connection, f"{self._name}: {user}", user, password)
        try:
            await link.open(login, login.connect_timeout)
            rights = await link.rights(login.request_timeout)
            self._check_user(user, rights)
        except BaseException as error:
            await link.close()
            if isinstance(error, AuthenticationFailed):
                raise LoginRefused(WRONG_LOGIN) from None
            if isinstance(error, PermissionDenied):
                raise LoginRefused(
                    f"user '{user}' may not ask the broker for its rights: let it publish to "
                    f"{WHO_AM_I}"
                ) from None
            if isinstance(error, MillstreamError):
                raise LoginUnavailable(f"the broker cannot be asked: {error}") from error
            raise
        return link, rights

    def _check_user(self, user: str, rights: Rights) -> None:
        if rights.user != user:  # a certificate, or something else than its name, decided
            raise LoginRefused(f"the broker takes user '{user}' for another one")
        if not rights.belongs_to(self._account):
            theirs = base_account(rights.account, user)
            raise LoginRefused(
                f"user '{user}' belongs to the account '{theirs}'; this gateway serves the "
                f"account '{self._account}'"
            )

    async def _make_room(self) -> None:
        """Room for one more login; a user without connections makes way."""
        if len(self._logins) < USERS_MAX:
            return
        for key, login in self._logins.items():
            if not login.access.in_use and login.unused_since is not None:
                await self._drop(key, login)
                return
        raise LoginUnavailable(f"{USERS_MAX:,} users are logged in, the limit")

    # -- what the broker is asked -------------------------------------------------------------

    @property
    def _connection(self) -> ConnectionSettings:
        """How to connect to the broker; first to the server that the gateway itself uses."""
        settings = self._mill.connection.settings
        urls = dict.fromkeys((self._mill.connection.url, *settings.urls))
        return replace(settings, urls=tuple(urls))

    @property
    def _name(self) -> str:
        return f"millstream gateway {self._settings.name}"

    async def _own_rights(self) -> Rights:
        try:
            _, answer = await self._mill.connection.request(WHO_AM_I, asks_again=True)
        except PermissionDenied as error:
            raise ConfigError(
                f"the gateway's user may not ask the broker who it is: let it publish to {WHO_AM_I}"
            ) from error
        return rights_in(answer)

    async def _accepts(self, user: str | None, password: Secret | None) -> bool:
        """Whether the broker accepts a login."""
        link = UserLink()
        login = as_user(self._connection, self._name, user, password)
        try:
            await link.open(login, login.connect_timeout)
        except AuthenticationFailed:
            return False
        finally:
            await link.close()
        return True

    async def _offered(self) -> tuple[str, ...]:
        """The mechanisms by which clients can log in."""
        plain = self._settings.tls or is_loopback(self._settings.host)
        folder = self._folder
        scram = folder is not None and await asyncio.to_thread(folder.usable)
        if not plain and not scram:
            raise ConfigError(
                f"clients could not log in: passwords are not sent over a network without TLS. "
                f"Give a certificate (--tls-cert, --tls-key) for {self._settings.host}"
            )
        if not plain:
            _log.warning(
                "%s: clients can log in by SCRAM only, because passwords are not sent over a "
                "network without TLS (--tls-cert, --tls-key)",
                self._settings.name,
            )
        return (*((PLAIN,) if plain else ()), *(SCRAM_HASHES if scram else ()))

    # -- keeping rights fresh -----------------------------------------------------------------

    async def _watch(self) -> None:
        """Ask the broker now and then about each user that is logged in."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._soon.wait()
            self._soon.clear()
            looks = [self._look(key, login) for key, login in self._logins.items()]
            for error in await asyncio.gather(*looks, return_exceptions=True):
                if isinstance(error, Exception):
                    self._failures.warn(error, "the rights of a user were not checked")
            await asyncio.sleep(SOON_SECONDS)

    async def _look(self, key: tuple[str, bytes], login: _Login) -> None:
        if not login.access.in_use and await self._is_old(key, login):
            return
        async with self._looks:
            if login.link.up:
                await self._ask(key, login)
            elif self._mill.connected:  # else the broker is away: nobody is thrown out for that
                await self._prove_again(key, login)

    async def _is_old(self, key: tuple[str, bytes], login: _Login) -> bool:
        """Forget a user without connections bit by bit; whether nothing is left."""
        now = asyncio.get_running_loop().time()
        if login.unused_since is None:
            login.unused_since = now
            return False
        login.password = None
        if login.link.up and now - login.unused_since < KEPT_SECONDS:
            return False
        await self._drop(key, login)
        return True

    async def _ask(self, key: tuple[str, bytes], login: _Login) -> None:
        """Ask over the user's connection."""
        try:
            rights = await login.link.rights(self._connection.request_timeout)
            self._check_user(login.access.user, rights)
        except (ConnectError, RequestTimeout):
            await login.link.close()  # it must be made again
            self._soon.set()
        except PermissionDenied:
            await self._revoke(key, login, f"it may not ask the broker for its rights ({WHO_AM_I})")
        except LoginRefused as error:
            await self._revoke(key, login, str(error))
        else:
            login.refusals = 0
            login.access.update(rights)

    async def _prove_again(self, key: tuple[str, bytes], login: _Login) -> None:
        """Connect as the user again; after several refusals it is not accepted any more."""
        if login.password is None:
            await self._revoke(key, login, "log in again")
            return
        try:
            link, rights = await self._proved(login.access.user, login.password)
        except LoginUnavailable:
            return
        except LoginRefused as error:
            login.refusals += 1
            if login.refusals < REFUSALS_MAX:
                self._soon.set()
            else:
                await self._revoke(key, login, str(error))
            return
        if self._logins.get(key) is login:
            await self._replace_link(login, link, rights)
        else:
            await link.close()

    async def _replace_link(self, login: _Login, link: UserLink, rights: Rights) -> None:
        before, login.link = login.link, link
        login.refusals = 0
        login.access.update(rights)
        await before.close()

    async def _revoke(self, key: tuple[str, bytes], login: _Login, reason: str) -> None:
        text = "user %r is logged out: %s"
        self._failures.warn(None, text, login.access.user, reason)
        await self._drop(key, login, reason)

    async def _drop(self, key: tuple[str, bytes], login: _Login, reason: str = "unused") -> None:
        """Forget a login; a connection that comes to use it at this moment must log in again."""
        if self._logins.get(key) is login:
            del self._logins[key]
        login.access.revoke(f"user '{login.access.user}' is logged out: {reason}")
        await login.link.close()


def _seen(task: asyncio.Task[Access]) -> None:
    """Its error is that of those who wait for it; there may be nobody any more."""
    if not task.cancelled():
        task.exception()


def _token() -> str:
    return secrets.token_urlsafe(24)
