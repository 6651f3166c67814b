"""The configuration text matches the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker import (
    Account,
    BrokerSettings,
    Encryption,
    LeafRemote,
    LeafSettings,
    Limits,
    Permissions,
    Role,
    User,
)
from millstream.broker.render import ClusterPlan, NodePlan, Ports, config_text, quoted
from millstream.broker.roles import boundary_of, permissions_of
from millstream.errors import ConfigError
from millstream.settings import Secret


def plan(users: tuple[User, ...] = (), **settings: Any) -> NodePlan:
    return NodePlan(
        settings=BrokerSettings(data=Path("/data"), **settings),
        name="mill-n1",
        store=Path('/data/a "b"/store'),
        run=Path("/data/run"),
        ports=Ports(4222, 8222, 6222, 7422),
        users=users,
        system=User("system", Secret("sys-pw")),
        anonymous=None,
        leaf_users=(User("leaf", Secret("leaf-pw")),),
        max_file_store=1000,
        max_memory_store=500,
    )


def unquote(text: str) -> str:
    """A quoted string, parsed as the server does it."""
    assert text[0] == text[-1] == '"'
    result, rest = "", text[1:-1]
    named = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\"}
    while rest:
        if rest[0] != "\\":
            assert rest[0] != '"', "an unescaped quote ends the string early"
            result, rest = result + rest[0], rest[1:]
        elif rest[1] == "x":
            result, rest = result + chr(int(rest[2:4], 16)), rest[4:]
        else:
            result, rest = result + named[rest[1]], rest[2:]
    return result


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_every_text_survives_quoting_on_one_line(text: str) -> None:
    assert unquote(quoted(text)) == text
    assert "\n" not in quoted(text)


def test_a_nul_cannot_be_quoted() -> None:
    with pytest.raises(ConfigError, match="NUL"):
        quoted("a\0b")


def test_the_safe_defaults_are_in_the_text() -> None:
    text = config_text(plan())
    assert 'sync_interval: "always"' in text
    assert 'listen: "127.0.0.1:4222"' in text
    assert 'http: "127.0.0.1:8222"' in text
    assert "max_payload: 8388608" in text
    assert "max_file_store: 1000" in text
    assert "default_max_consumers: 100000" in text
    assert '"sys-pw"' in text
    assert "no_auth_user" not in text


def test_a_path_with_quotes_cannot_end_its_string() -> None:
    assert r'store_dir: "/data/a \"b\"/store"' in config_text(plan())


def test_durability_chooses_when_to_sync() -> None:
    assert 'sync_interval: "2500ms"' in config_text(plan(durability="periodic", sync_interval=2.5))
    assert "sync_interval" not in config_text(plan(durability="memory"))


def test_the_encryption_key_is_not_in_the_text() -> None:
    encryption = Encryption(key=Secret("very-secret-key-1"), previous=Secret("very-secret-key-0"))
    text = config_text(plan(encryption=encryption))
    assert "very-secret" not in text
    assert "key: $MILLSTREAM_STORE_KEY\n" in text
    assert "prev_key: $MILLSTREAM_STORE_PREVIOUS_KEY\n" in text
    assert 'cipher: "aes"' in text


def test_monitoring_stays_on_loopback_when_the_broker_is_open() -> None:
    text = config_text(plan(host="0.0.0.0", auth=True))
    assert 'listen: "0.0.0.0:4222"' in text
    assert 'http: "127.0.0.1:8222"' in text


def test_an_ipv6_address_is_bracketed() -> None:
    assert 'listen: "[::1]:4222"' in config_text(plan(host="::1"))


def test_users_are_in_their_accounts_with_their_permissions() -> None:
    users = (
        User("ann", Secret('p"w'), Role.ADMIN),
        User("bob", Secret("pw"), Role.READER, account="acme"),
    )
    text = config_text(plan(users, accounts=(Account("acme", max_streams=7),)))
    main, acme = text.split("  acme: {")
    assert r'password: "p\"w"' in main
    assert "max_streams: 7" in acme
    assert '"ann"' not in acme
    assert '"$JS.API.STREAM.INFO.*"' in acme


def test_an_empty_allow_list_allows_nothing() -> None:
    silent = User("ann", Secret("x"), permissions=Permissions(publish=(), subscribe=()))
    text = " ".join(config_text(plan((silent,))).split())
    assert text.count('deny: [ ">" ]') == 2


def test_cluster_routes_and_listener_have_the_secret() -> None:
    given = plan()
    cluster = ClusterPlan("127.0.0.1", ("10.0.0.1:6222",), Secret("s/c@r:t"))
    text = config_text(
        NodePlan(
            **{
                name: getattr(given, name)
                for name in NodePlan.__dataclass_fields__
                if name != "cluster"
            },
            cluster=cluster,
        )
    )
    assert '"nats://route:s%2Fc%40r%3At@10.0.0.1:6222"' in text
    assert 'password: "s/c@r:t"' in text
    assert 'listen: "127.0.0.1:6222"' in text


def test_leaf_nodes_listen_with_users_and_remotes_with_credentials() -> None:
    remote = LeafRemote("nats-leaf://hub:7422", "me", Secret("p w"))
    text = config_text(plan(domain="edge", leaf=LeafSettings(port=7422, remotes=(remote,))))
    assert '"nats-leaf://me:p%20w@hub:7422"' in text
    assert '"leaf-pw"' in text
    assert 'domain: "edge"' in text


def test_raw_text_comes_last_and_unchanged() -> None:
    text = config_text(plan(raw="ping_interval: 7s"))
    assert text.endswith("\nping_interval: 7s\n")


def test_limits_are_passed_on() -> None:
    text = config_text(plan(limits=Limits(max_payload=1024, max_connections=5)))
    assert "max_payload: 1024" in text
    assert "max_connections: 5" in text


def test_roles_differ_in_what_they_may_publish_to() -> None:
    admin = permissions_of(User("a", Secret("x"), Role.ADMIN))
    app = permissions_of(User("a", Secret("x"), Role.APP))
    reader = permissions_of(User("a", Secret("x"), Role.READER, subscriptions=(("S", "c"),)))
    assert admin == Permissions()
    assert "$JS.API.STREAM.DELETE.>" in app.publish_deny
    assert "$JS.*.API.STREAM.DELETE.>" in app.publish_deny
    assert app.publish is None
    assert reader.publish is not None
    assert not any("CREATE" in subject for subject in reader.publish)
    assert "$JS.API.CONSUMER.MSG.NEXT.S.c" in reader.publish
    assert "$JS.ACK.S.c.*.*.*.*.*" in reader.publish


def test_a_bounded_user_has_an_account_that_imports_only_its_calls() -> None:
    users = (
        User("eyes", Secret("e"), Role.READER),
        User("till", Secret("t"), topics=("orders:2",), subscriptions=(("orders-0", "c"),)),
    )
    bounds = [boundary_of(user) for user in users]
    assert [b.account for b in bounds if b] == ["main:eyes", "main:till"]
    for bound in bounds:
        assert bound is not None
        calls = {service.subject: service.streamed for service in bound.services}
        assert not any(word in call for call in calls for word in ("CREATE", "DELETE", "PURGE"))
        assert len(calls) == len(bound.services)
    assert calls["orders.>"] is False
    assert calls["$JS.API.DIRECT.GET.orders-1"] is True
    assert "$JS.API.STREAM.INFO.*" not in calls
    assert "$JS.API.DIRECT.GET.orders" not in calls
    text = config_text(plan(users=users))
    assert '"main:till": {' in text
    assert text.count('response: "stream"') == len(
        {s.subject for b in bounds if b for s in b.services if s.streamed}
    )


def test_a_user_with_permissions_of_its_own_or_without_topics_is_not_bounded() -> None:
    own = User("a", Secret("x"), Role.READER, permissions=Permissions(publish=("x",)))
    assert boundary_of(own) is None
    assert boundary_of(User("a", Secret("x"))) is None
    assert boundary_of(User("a", Secret("x"), Role.ADMIN)) is None


@pytest.mark.parametrize("topic", ["orders:0", "orders:x", "a.b", ">", "orders:9999"])
def test_a_topic_that_cannot_be_one_is_refused(topic: str) -> None:
    with pytest.raises(ConfigError):
        User("till", Secret("t"), topics=(topic,))


def test_only_an_app_is_bounded_to_topics() -> None:
    with pytest.raises(ConfigError, match="role app"):
        User("eyes", Secret("e"), Role.READER, topics=("orders",))
