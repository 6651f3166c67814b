"""Logins at a gateway: the broker's users and roles decide, and changes take effect at once."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.broker import (
    Account,
    AuthCallout,
    Broker,
    Permissions,
    Role,
    User,
    find_binary,
    new_key,
)
from millstream.broker.private_files import ports_in
from millstream.deadline import Deadline
from millstream.errors import ConfigError
from millstream.gateways import access as access_module
from millstream.gateways.access import Access, LoginRefused, Logins, LoginUnavailable
from millstream.gateways.kafka.sasl import ScramExchange, read_client_first
from millstream.gateways.rights import TopicSubjects
from millstream.gateways.scram import SCRAM_HASHES, WRONG_LOGIN
from millstream.gateways.settings import GatewaySettings
from millstream.settings import Secret
from millstream.testing import running_broker
from tests.certificates import make_certificate
from tests.integration.security.test_operator_mode import deciding
from tests.unit.gateways.sasl_client import ScramClient

USERS = (
    User("ann", Secret("ann-password")),
    User("rea", Secret("rea-password"), Role.READER),
    User("bob", Secret("bob-password"), topics=("orders:2",), subscriptions=(("orders", "audit"),)),
    User("mute", Secret("mute-password"), permissions=Permissions(publish=("orders.>",))),
    User("acme-eve", Secret("eve-password"), account="acme"),
    User("acme-rea", Secret("eve-password"), Role.READER, "acme"),
    # The server takes this for the hash of a password (it is that of "hashed").
    User("sal", Secret("$2b$04$ypk7a4TflMJCSOgCtKOJweRPGgkcd3r1bfislYhuyWzZHdib/4xsq")),
)
PATIENCE = 60.0  # seconds, for what takes milliseconds on a machine that is not busy

ORDERS = TopicSubjects(("orders-0", "orders-1"), ("orders",))
OTHER = TopicSubjects(("other",), ("other",))


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker(auth=True, users=USERS, accounts=(Account("acme"),)) as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses: tests wait for what comes after them."""
    for name in ("LOOK_SECONDS", "SOON_SECONDS", "FAILURE_SECONDS", "FAILURE_STEP"):
        monkeypatch.setattr(access_module, name, 0.02)


def gateway(**values: Any) -> GatewaySettings:
    return GatewaySettings(**values)


@asynccontextmanager
async def logins_of(
    broker: Broker, settings: GatewaySettings | None = None, data: Path | None = None
) -> AsyncIterator[Logins]:
    who = broker.credentials(Role.ADMIN)
    async with millstream.connect(broker.url, user=who.user, password=who.password) as mill:
        logins = Logins(mill, settings or gateway(), data)
        await logins.start()
        try:
            yield logins
        finally:
            await logins.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


@pytest.fixture
def bare_server(tmp_path: Path) -> Iterator[str]:
    """A server without users, which accepts everybody."""
    server = subprocess.Popen(
        [str(find_binary().path), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", tmp_path],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = Deadline(PATIENCE)
        while (ports := ports_in(str(tmp_path), server.pid)) is None and not deadline.passed:
            time.sleep(0.01)
        assert ports is not None
        yield ports["nats"][0]
    finally:
        server.kill()
        server.wait()


def log_in(logins: Logins, user: str, password: str | None = None) -> Awaitable[Access]:
    return logins.plain(user, Secret(password or f"{user}-password"))


async def scram(logins: Logins, user: str, password: str, mechanism: str) -> Access:
    client = ScramClient(mechanism, user, password)
    verifier = await logins.scram(user, mechanism)
    exchange = ScramExchange(read_client_first(client.first), verifier, "nonce-of-the-server")
    assert client.trusts(exchange.finish(client.final(exchange.challenge)))
    return await logins.access_of(user, verifier)


# -- who may log in ---------------------------------------------------------------------------


async def test_a_user_may_do_at_a_gateway_what_its_role_allows(broker: Broker) -> None:
    async with logins_of(broker) as logins:
        assert logins.required
        ann, rea, bob = [await log_in(logins, name) for name in ("ann", "rea", "bob")]
    assert (ann.user, rea.user, bob.user) == ("ann", "rea", "bob")
    assert ann.may_read(OTHER)
    assert ann.may_write(OTHER)
    assert ann.may_create("new")
    assert not ann.may_manage(OTHER)
    assert rea.may_read(OTHER)
    assert not rea.may_write(OTHER)
    assert not rea.may_create("new")
    assert bob.may_read(ORDERS)
    assert bob.may_write(ORDERS)
    assert not bob.may_read(OTHER)
    assert not bob.may_write(OTHER)
    assert [bob.may_join(group) for group in ("bob", "bob.x", "audit", "team")] == [
        *(True, True, True, False)
    ]
    assert ann.may_join("team")
    admin = broker.credentials(Role.ADMIN)
    async with logins_of(broker) as logins:
        boss = await logins.plain(admin.user, admin.password)
        assert boss.rights.unlimited
        assert boss.may_manage(OTHER)


@pytest.mark.parametrize(
    ("user", "password"),
    [
        ("ann", "wrong"),
        ("nobody", "wrong"),
        ("ann", ""),
        ("", "ann-password"),
        ("sal", "$2b$04$ypk7a4TflMJCSOgCtKOJweRPGgkcd3r1bfislYhuyWzZHdib/4xsq"),
    ],
)
async def test_wrong_passwords_and_unknown_users_get_the_same_answer(
    broker: Broker, user: str, password: str
) -> None:
    async with logins_of(broker) as logins:
        with pytest.raises(LoginRefused) as refused:
            await logins.plain(user, Secret(password))
    assert str(refused.value) == WRONG_LOGIN


@pytest.mark.parametrize(
    ("user", "password", "word"),
    [
        ("acme-eve", "eve-password", "belongs to the account 'acme'.*serves the account 'main'"),
        ("acme-rea", "eve-password", "belongs to the account 'acme'"),
        ("mute", "mute-password", "USER.INFO"),
        ("system", None, "SYS"),
    ],
)
async def test_users_that_the_gateway_cannot_serve_get_the_reason(
    broker: Broker, user: str, password: str | None, word: str
) -> None:
    secret = broker.credentials("system").password if password is None else Secret(password)
    async with logins_of(broker) as logins:
        with pytest.raises(LoginRefused, match=word):
            await logins.plain(user, secret)


async def test_a_login_in_the_address_of_the_broker_is_not_taken_for_that_of_a_client(
    broker: Broker,
) -> None:
    who = broker.credentials(Role.ADMIN)
    url = broker.url.replace("://", f"://{who.user}:{who.password.reveal()}@")
    async with millstream.connect(url) as mill:
        logins = Logins(mill, gateway())
        await logins.start()
        with pytest.raises(LoginRefused, match=WRONG_LOGIN):
            await log_in(logins, "ann", "wrong")
        assert (await log_in(logins, "ann")).user == "ann"
        await logins.stop()


async def test_connections_of_one_user_share_a_login(broker: Broker) -> None:
    async with logins_of(broker) as logins:
        first = await asyncio.gather(*(log_in(logins, "ann") for _ in range(200)))
        later = await log_in(logins, "ann")
        assert {id(one) for one in (*first, later)} == {id(later)}
        with pytest.raises(LoginRefused):
            await log_in(logins, "ann", "wrong")
        assert not later.revoked


async def test_a_hashed_password_of_the_broker_is_checked(broker: Broker) -> None:
    async with logins_of(broker) as logins:
        assert (await log_in(logins, "sal", "hashed")).user == "sal"


# -- SCRAM ------------------------------------------------------------------------------------


async def test_scram_is_offered_beside_the_data_folder_only(broker: Broker) -> None:
    async with logins_of(broker) as logins:
        assert logins.mechanisms == ("PLAIN",)
        with pytest.raises(LoginRefused, match="not offered"):
            await logins.scram("ann", "SCRAM-SHA-256")
    async with logins_of(broker, data=broker.data) as logins:
        assert logins.mechanisms == ("PLAIN", *SCRAM_HASHES)


@pytest.mark.parametrize("mechanism", SCRAM_HASHES)
async def test_scram_proves_the_passwords_of_the_broker(broker: Broker, mechanism: str) -> None:
    async with logins_of(broker, data=broker.data) as logins:
        one = await scram(logins, "bob", "bob-password", mechanism)
        assert one.may_read(ORDERS)
        assert not one.may_read(OTHER)
        assert await log_in(logins, "bob") is one
        with pytest.raises(LoginRefused, match="belongs to the account"):
            await scram(logins, "acme-eve", "eve-password", mechanism)
        for user in ("nobody", "sal"):  # of a hash nobody knows the password
            assert not (await logins.scram(user, mechanism)).known


async def test_a_verifier_of_a_changed_password_is_worth_nothing(tmp_path: Path) -> None:
    ann = User("ann", Secret("ann-password"))
    with running_broker(users=(ann,), auth=True, data=tmp_path) as broker:
        async with logins_of(broker, data=tmp_path) as logins:
            before = await logins.scram("ann", "SCRAM-SHA-256")
            changed = replace(broker.settings, users=(replace(ann, password=Secret("new")),))
            await asyncio.to_thread(broker.reload, changed)
            with pytest.raises(LoginRefused, match=WRONG_LOGIN):
                await logins.access_of("ann", before)
            assert (await scram(logins, "ann", "new", "SCRAM-SHA-256")).user == "ann"


# -- what is offered, and to whom -------------------------------------------------------------


async def test_passwords_are_not_taken_over_a_network_without_tls(
    broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network: dict[str, Any] = {"host": "0.0.0.0", "advertise": "mill.example.org", "auth": True}
    with pytest.raises(ConfigError, match="--tls-cert"):
        async with logins_of(broker, gateway(**network)):
            pass
    with caplog.at_level(logging.WARNING):
        async with logins_of(broker, gateway(**network), broker.data) as logins:
            assert logins.mechanisms == tuple(SCRAM_HASHES)
            with pytest.raises(LoginRefused, match="only over TLS"):
                await log_in(logins, "ann")
    assert "SCRAM only" in caplog.text
    cert = await asyncio.to_thread(make_certificate, tmp_path)
    files = {"tls_cert": cert, "tls_key": cert.with_suffix(".key")}
    tls = await asyncio.to_thread(lambda: gateway(**network, **files))
    async with logins_of(broker, tls) as logins:
        assert logins.mechanisms == ("PLAIN",)
        assert (await log_in(logins, "ann")).user == "ann"


async def test_a_gateway_asks_for_a_login_if_the_broker_does(broker: Broker) -> None:
    async with logins_of(broker, gateway(auth=False)) as logins:
        assert not logins.required
    with running_broker() as free:
        async with millstream.connect(free.url) as mill:
            for auth, required in ((None, False), (True, True)):
                logins = Logins(mill, gateway(auth=auth))
                await logins.start()
                assert logins.required is required
                await logins.stop()


async def test_clients_of_a_gateway_without_logins_may_do_everything(broker: Broker) -> None:
    async with logins_of(broker, gateway(auth=False)) as logins:
        anybody = logins.open_access()
        assert anybody.user == ""
        assert anybody.may_manage(OTHER)
        assert anybody.may_join("team")


async def test_a_broker_that_accepts_any_password_is_no_proof(bare_server: str) -> None:
    async with millstream.connect(bare_server, connect_timeout=PATIENCE) as mill:
        logins = Logins(mill, gateway(auth=True))
        with pytest.raises(ConfigError, match="accepts any user and password"):
            await logins.start()
        logins = Logins(mill, gateway())
        await logins.start()
        assert not logins.required


async def test_a_service_of_yours_may_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    issuer = new_key("account")
    settings: dict[str, Any] = {"auth": True, "accounts": (Account("logins"),)}
    with running_broker(**settings, callout=AuthCallout(issuer.public, "logins")) as broker:
        async with deciding(broker, issuer) as asked, logins_of(broker) as logins:
            asked.clear()
            with pytest.raises(LoginRefused, match="may not ask the broker"):
                await log_in(logins, "ali", "sesame")
            with pytest.raises(LoginRefused, match=WRONG_LOGIN):
                await log_in(logins, "ali", "guess")
            assert asked == ["ali", "ali"]


# -- while connections are open ---------------------------------------------------------------


@asynccontextmanager
async def changing() -> AsyncIterator[tuple[Broker, Logins]]:
    with running_broker(users=(USERS[0], USERS[1]), auth=True) as broker:
        async with logins_of(broker) as logins:
            yield broker, logins


async def test_a_changed_role_takes_effect_on_open_connections() -> None:
    async with changing() as (broker, logins):
        ann = await log_in(logins, "ann")
        closed: list[str] = []
        ann.join(closed.append)
        assert ann.may_write(OTHER)
        assert not ann.may_manage(OTHER)
        for role, change in (
            (Role.ADMIN, lambda: ann.may_manage(OTHER)),
            (Role.READER, lambda: ann.may_read(OTHER) and not ann.may_write(OTHER)),
            (Role.APP, lambda: ann.may_write(OTHER) and not ann.may_manage(OTHER)),
        ):
            users = (replace(USERS[0], role=role), USERS[1])
            await asyncio.to_thread(broker.reload, replace(broker.settings, users=users))
            await until(change)
        assert not closed


@pytest.mark.parametrize("how", ["removed", "password", "account"])
async def test_a_user_that_is_not_accepted_any_more_is_logged_out(how: str) -> None:
    async with changing() as (broker, logins):
        ann, rea = await log_in(logins, "ann"), await log_in(logins, "rea")
        closed: list[str] = []
        ann.join(closed.append)
        ann.join(lambda reason: closed.append(reason))
        rea.join(lambda reason: closed.append(f"rea: {reason}"))
        users: tuple[User, ...] = (USERS[1],)
        accounts: tuple[Account, ...] = ()
        if how == "password":
            users = (*users, replace(USERS[0], password=Secret("new")))
        elif how == "account":
            users, accounts = (*users, replace(USERS[0], account="acme")), (Account("acme"),)
        changed = replace(broker.settings, users=users, accounts=accounts)
        await asyncio.to_thread(broker.reload, changed)
        await until(lambda: ann.revoked)
        assert len(closed) == 2
        assert "user 'ann' is logged out" in closed[0]
        assert not ann.may_read(OTHER)
        assert not rea.revoked
        with pytest.raises(LoginRefused):
            await log_in(logins, "ann")
        if how == "password":
            again = await log_in(logins, "ann", "new")
            assert again is not ann
            assert again.may_read(OTHER)


async def test_nobody_is_thrown_out_while_the_broker_is_away() -> None:
    async with changing() as (broker, logins):
        ann, rea = await log_in(logins, "ann"), await log_in(logins, "rea")
        closed: list[str] = []
        ann.join(closed.append)
        await asyncio.to_thread(broker.stop)
        with pytest.raises(LoginUnavailable):
            await log_in(logins, "ann")
        with pytest.raises(LoginUnavailable):
            await log_in(logins, "ann", "wrong")
        assert ann.may_write(OTHER)
        await asyncio.to_thread(broker.start)
        assert await log_in(logins, "ann") is ann
        # One without connections was forgotten, with its password.
        await until(lambda: rea.revoked)
        assert (await log_in(logins, "rea")).may_read(OTHER)
        # The rights are fresh again.
        users = (replace(USERS[0], role=Role.ADMIN), USERS[1])
        await asyncio.to_thread(broker.reload, replace(broker.settings, users=users))
        await until(lambda: ann.may_manage(OTHER))
        assert not closed


async def test_the_connection_to_the_broker_is_made_again_without_the_client() -> None:
    async with changing() as (broker, logins):
        ann = await log_in(logins, "ann")
        closed: list[str] = []
        ann.join(closed.append)
        await asyncio.to_thread(broker.restart)
        users = (replace(USERS[0], role=Role.ADMIN), USERS[1])
        await asyncio.to_thread(broker.reload, replace(broker.settings, users=users))
        await until(lambda: ann.may_manage(OTHER))
        assert not closed


async def test_a_user_that_left_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "KEPT_SECONDS", 0.0)
    async with changing() as (_, logins):
        ann = await log_in(logins, "ann")
        ann.join(print)
        rea = await log_in(logins, "rea")
        await until(lambda: rea.revoked)
        assert not ann.revoked
        ann.leave(print)
        await until(lambda: ann.revoked)
        assert await log_in(logins, "ann") is not ann


async def test_no_more_users_are_logged_in_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "USERS_MAX", 1)
    async with changing() as (_, logins):
        ann = await log_in(logins, "ann")
        ann.join(print)
        with pytest.raises(LoginUnavailable, match="the limit"):
            await log_in(logins, "rea")
        ann.leave(print)
        await until_able(lambda: log_in(logins, "rea"))
        assert ann.revoked


async def until_able(attempt: Callable[[], Awaitable[Access]]) -> Access:
    """The result of an attempt, as soon as it is possible."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await attempt()
            except LoginUnavailable:
                await asyncio.sleep(0.01)


# -- secrets ----------------------------------------------------------------------------------


async def test_no_password_is_logged(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with logins_of(broker, data=broker.data) as logins:
            ann = await log_in(logins, "ann")
            with pytest.raises(LoginRefused):
                await log_in(logins, "ann", "a-wrong-password")
            await scram(logins, "bob", "bob-password", "SCRAM-SHA-256")
            shown = caplog.text + repr([ann, ann.rights, logins, vars(logins)])
    for secret in ("ann-password", "bob-password", "a-wrong-password"):
        assert secret not in shown
