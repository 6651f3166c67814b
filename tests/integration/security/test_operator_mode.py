"""Operator mode and auth callout: logins that the broker's own settings do not list."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.broker import (
    Account,
    AuthCallout,
    BrokerSettings,
    OperatorSettings,
    Role,
    SigningKey,
    User,
    account_claims,
    add_user,
    creds_text,
    list_users,
    new_key,
    operator_claims,
    read_claims,
    remove_user,
    sign,
    user_claims,
)
from millstream.errors import AuthenticationFailed, ConfigError, PermissionDenied
from millstream.settings import Secret
from millstream.testing import running_broker
from tests.integration.broker.clients import client


class Operator:
    """An operator with a system account and two tenants, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key, self.system = new_key("operator"), new_key("account")
        self.accounts = {"main": new_key("account"), "acme": new_key("account")}
        claims = operator_claims(self.key.public, "op", self.system.public)
        (folder / "operator.jwt").write_text(sign(claims, self.key))
        tokens = [
            sign(account_claims(self.system.public, "SYS", jetstream=False), self.key),
            *(
                sign(account_claims(key.public, name), self.key)
                for name, key in self.accounts.items()
            ),
        ]
        (folder / "accounts.jwt").write_text("\n".join(tokens))
        self.creds("system", self.system, bearer=True)

    def creds(self, name: str, account: SigningKey, **rights: Any) -> str:
        key = new_key("user")
        file = self.folder / f"{name}.creds"
        file.write_text(
            creds_text(sign(user_claims(key.public, name, **rights), account), key.seed)
        )
        return str(file)

    @property
    def settings(self) -> OperatorSettings:
        return OperatorSettings(
            self.folder / "operator.jwt",
            self.folder / "accounts.jwt",
            self.folder / "system.creds",
        )


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    return Operator(tmp_path)


async def test_users_of_an_operators_accounts_log_in_with_creds(
    operator: Operator, tmp_path: Path
) -> None:
    main, acme = operator.accounts["main"], operator.accounts["acme"]
    ann, bob = operator.creds("ann", main), operator.creds("bob", acme)
    narrow = operator.creds("narrow", main, publish=("$JS.API.STREAM.INFO.>",))
    stranger = operator.creds("stranger", new_key("account"))
    with running_broker(operator=operator.settings) as broker:
        assert broker.monitor == ""
        async with (
            millstream.connect(broker.url, creds=ann) as one,
            millstream.connect(broker.url, creds=bob) as other,
            client(broker.url, user_credentials=ann) as plain,
        ):
            await (await one.create_topic("orders")).publish(b"1")
            assert (await plain.jetstream().stream_info("orders")).state.messages == 1
            assert await other.topics() == []
        async with millstream.connect(broker.url, creds=narrow) as limited:
            topic = await limited.topic("orders")
            with pytest.raises(PermissionDenied):
                await topic.publish(b"2")
        logins: list[dict[str, Any]] = [{}, {"creds": stranger}, {"user": "a", "password": "x"}]
        for login in logins:
            with pytest.raises(AuthenticationFailed):
                await millstream.connect(broker.url, **login)
        health = broker.health()
        assert health.ok
        assert [stream.name for stream in health.streams] == ["orders"]
        broker.restart()
        async with millstream.connect(broker.url, creds=ann) as one:
            assert [e.value async for e in (await one.topic("orders")).read()] == [b"1"]


def test_an_operator_without_its_system_account_is_refused(
    operator: Operator, tmp_path: Path
) -> None:
    (tmp_path / "accounts.jwt").write_text("")
    with (
        pytest.raises(ConfigError, match="system account"),
        running_broker(operator=operator.settings),
    ):
        pass
    (tmp_path / "accounts.jwt").write_text("nonsense")
    with pytest.raises(ConfigError, match="not a JWT"), running_broker(operator=operator.settings):
        pass


def test_modes_that_exclude_each_other_are_refused(operator: Operator, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="operator mode"):
        BrokerSettings(data=tmp_path, operator=operator.settings, auth=True)
    with pytest.raises(ConfigError, match="needs a user"):
        BrokerSettings(data=tmp_path, callout=AuthCallout(new_key("account").public, "x"))
    with pytest.raises(ConfigError, match="an account of its own"):
        AuthCallout(new_key("account").public, "main")
    with pytest.raises(ConfigError, match="no account 'x'"):
        BrokerSettings(
            data=tmp_path, auth=True, callout=AuthCallout(new_key("account").public, "x")
        )
    with pytest.raises(ConfigError, match="starts with A"):
        AuthCallout(new_key("user").public, "logins")


@asynccontextmanager
async def deciding(broker: Any, issuer: SigningKey) -> AsyncIterator[list[str]]:
    """A service that lets in everybody who knows the password "sesame"."""
    asked: list[str] = []

    async def decide(message: Any) -> None:
        request = read_claims(message.data.decode())["nats"]
        login = request["connect_opts"]
        asked.append(login.get("user", ""))
        answer: dict[str, Any] = {"type": "authorization_response", "version": 2}
        if login.get("pass") == "sesame":
            user = user_claims(
                request["user_nkey"], login["user"], publish=("orders.>", "$JS.API.>")
            )
            answer["jwt"] = sign({**user, "aud": "main"}, issuer)
        else:
            answer["error"] = "wrong password"
        claims = {
            "sub": request["user_nkey"],
            "aud": request["server_id"]["id"],
            "iat": user_claims(request["user_nkey"], "")["iat"],
            "nats": answer,
        }
        await message.respond(sign(claims, issuer).encode())

    async with client(broker.url, broker.credentials(Role.ADMIN, "logins")) as service:
        await service.subscribe("$SYS.REQ.USER.AUTH", cb=decide)
        await service.flush()
        yield asked


async def test_a_service_decides_which_logins_are_accepted() -> None:
    issuer = new_key("account")
    settings: dict[str, Any] = {"auth": True, "accounts": (Account("logins"),)}
    with running_broker(**settings, callout=AuthCallout(issuer.public, "logins")) as broker:
        assert broker.health().ok
        async with deciding(broker, issuer) as asked:
            who = broker.credentials(Role.APP)
            async with (
                millstream.connect(broker.url, user=who.user, password=who.password) as app,
                millstream.connect(broker.url, user="ali", password="sesame") as ali,
            ):
                await app.create_topic("orders")
                await (await ali.topic("orders")).publish(b"1")
                stock = await ali.create_table("stock")
                with pytest.raises(PermissionDenied):
                    await stock.put("a", b"1")
            with pytest.raises(AuthenticationFailed):
                await millstream.connect(broker.url, user="ali", password="guess")
            assert asked == ["ali", "ali"]


async def test_users_that_are_added_do_not_ask_the_service(tmp_path: Path) -> None:
    issuer = new_key("account")
    callout = AuthCallout(issuer.public, "logins")
    settings: dict[str, Any] = {"auth": True, "accounts": (Account("logins"),), "callout": callout}
    key = new_key("user")
    add_user(tmp_path, User("ann", nkey=key.public))
    add_user(tmp_path, User("bob", Secret("secret")))
    with running_broker(data=tmp_path, **settings) as broker:
        async with (
            millstream.connect(broker.url, nkey_seed=key.seed),
            millstream.connect(broker.url, user="bob", password="secret"),
        ):
            # The server cannot change whom it does not ask about while it runs.
            with pytest.raises(ConfigError, match="takes no new users"):
                add_user(tmp_path, User("eve", Secret("secret")))
            assert "eve" not in {user.name for user in list_users(tmp_path)}
        remove_user(tmp_path, "bob")
        async with deciding(broker, issuer) as asked:
            with pytest.raises(AuthenticationFailed):
                await millstream.connect(broker.url, user="bob", password="secret")
            assert asked == ["bob"]


def test_claims_are_signed_and_readable() -> None:
    key, account = new_key("user"), new_key("account")
    token = sign(user_claims(key.public, "ann", bearer=True), account)
    claims = read_claims(token)
    assert (claims["sub"], claims["iss"], claims["name"]) == (key.public, account.public, "ann")
    assert claims["nats"]["bearer_token"] is True
    assert key.seed.reveal() in creds_text(token, key.seed)
    assert key.seed.reveal() not in json.dumps(claims) + repr(key)
    with pytest.raises(ConfigError, match="public key"):
        account_claims(key.public, "acme")
    for text in ("", "a.b.c", "a.e30.c"):
        with pytest.raises(ConfigError, match="not a JWT"):
            read_claims(text)
