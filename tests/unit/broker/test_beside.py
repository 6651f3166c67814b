"""What a node is planned to run beside its server."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from millstream.broker.beside import kafka_port, planned, reloaded_kafka_port
from millstream.broker.config import BrokerSettings, OperatorSettings, User
from millstream.broker.credentials import generate_users, read_credentials
from millstream.broker.render import NodePlan, Ports
from millstream.errors import ConfigError, PortTaken
from millstream.settings import Secret


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path


def plan_of(settings: BrokerSettings, node: str = "n1", nodes: int = 1) -> dict[str, Any]:
    """What the plan of a node says; no more of it is looked at than its name and ports."""
    plan = object.__new__(NodePlan)
    object.__setattr__(plan, "name", f"{settings.name}-{node}")
    object.__setattr__(plan, "ports", Ports(client=4222, monitor=0, kafka=9092))
    found = planned(settings, plan, nodes)
    assert json.loads(json.dumps(found)) == found
    return found


def test_nothing_that_was_not_asked_for(data: Path) -> None:
    found = plan_of(BrokerSettings(data=data))
    assert found == {"guards": ["main"], "captures": [], "gateways": {}}


def test_a_gateway_has_the_chosen_port_and_its_other_settings(data: Path) -> None:
    own = {"tls_cert": data / "cert", "auth": True, "port": 1}
    settings = BrokerSettings(data=data, kafka=0, kafka_settings=own)
    wanted = {"tls_cert": str(data / "cert"), "auth": True, "port": 9092}
    assert plan_of(settings)["gateways"] == {"kafka": wanted}


def test_of_several_nodes_the_first_runs_captures_and_gateways(data: Path) -> None:
    settings = BrokerSettings(data=data, kafka=0, cdc=(data / "cdc.toml",))
    first, second = (plan_of(settings, node, nodes=2) for node in ("n1", "n2"))
    assert (len(first["captures"]), len(first["gateways"])) == (1, 1)
    assert (second["captures"], second["gateways"]) == ([], {})
    # A node of a cluster over several machines is the only one of its folder.
    assert len(plan_of(settings, "east")["gateways"]) == 1


def test_operator_mode_has_no_users_for_them(data: Path) -> None:
    files = [data / name for name in ("jwt", "accounts", "creds")]
    for file in files:
        file.touch()
    operator = OperatorSettings(*files)
    assert plan_of(BrokerSettings(data=data, operator=operator))["guards"] == []
    for setting, words in (
        ({"kafka": 0}, "'millstream gateway run kafka' and the credentials"),
        ({"cdc": (data / "cdc.toml",)}, "'millstream cdc run' and the credentials"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_of(BrokerSettings(data=data, operator=operator, **setting))


def test_the_user_of_gateways_is_made_when_there_is_one(data: Path) -> None:
    generate_users(BrokerSettings(data=data))
    with pytest.raises(ConfigError, match="no generated user 'gateway'"):
        read_credentials(data, "gateway")
    users = generate_users(BrokerSettings(data=data, kafka=0)).users
    assert [user.role for user in users if user.name == "gateway"] == ["admin"]
    assert read_credentials(data, "gateway").user == "gateway"
    mine = User("gateway", Secret("of somebody else"))
    with pytest.raises(ConfigError, match="'gateway' is taken by the Kafka gateway"):
        generate_users(BrokerSettings(data=data, kafka=0, users=(mine,)))
    generate_users(BrokerSettings(data=data, users=(mine,)))


def test_a_free_port_stays_the_same_and_a_taken_one_is_refused(data: Path) -> None:
    settings = BrokerSettings(data=data, kafka=0)
    assert kafka_port(BrokerSettings(data=data), 9092, set()) == 0
    chosen = kafka_port(settings, 0, set())
    assert kafka_port(settings, chosen, set()) == chosen
    assert kafka_port(settings, chosen, {chosen}) != chosen
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert kafka_port(settings, port, set()) != port
        with pytest.raises(PortTaken, match="--kafka N"):
            kafka_port(BrokerSettings(data=data, kafka=port), 0, set())
        # By the gateway itself, which runs.
        assert reloaded_kafka_port(BrokerSettings(data=data, kafka=port), port) == port
        assert reloaded_kafka_port(settings, port) == port
    assert reloaded_kafka_port(BrokerSettings(data=data), port) == 0
    assert reloaded_kafka_port(settings, 0) > 0


def test_a_port_that_is_none_is_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match="kafka: 70000 is not a port"):
        BrokerSettings(data=data, kafka=70_000)
