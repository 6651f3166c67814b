"""What runs beside the servers: guards of topics, captures of databases, gateways."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from millstream.broker.config import BrokerSettings
from millstream.broker.folder import can_listen, free_port
from millstream.broker.render import NodePlan
from millstream.errors import ConfigError, PortTaken

__all__ = ["CAPTURE", "GATEWAY", "GUARD", "KAFKA", "kafka_port", "planned", "reloaded_kafka_port"]

KAFKA: Final = "kafka"
_LOOPBACK: Final = "127.0.0.1"
_PROGRAM: Final = (sys.executable, "-P", "-m")
# They guard the topics of an account, capture a database, and serve clients of another protocol.
GUARD: Final = (*_PROGRAM, "millstream.cli.commands.guards")
CAPTURE: Final = (*_PROGRAM, "millstream.cli.commands.captures")
GATEWAY: Final = (*_PROGRAM, "millstream.cli.commands.gateways")


def planned(settings: BrokerSettings, plan: NodePlan, nodes: int) -> dict[str, Any]:
    """What a node runs, for its plan; in operator mode the broker has no users for it."""
    if settings.operator is None:
        guards = [account.name for account in settings.all_accounts] if settings.guards else []
    elif settings.cdc:
        raise ConfigError(
            "cdc: in operator mode the broker has no user for a capture; run it with "
            "'millstream cdc run' and the credentials of one"
        )
    elif settings.kafka is not None:
        raise ConfigError(
            "kafka: in operator mode the broker has no user for a gateway; run it with "
            "'millstream gateway run kafka' and the credentials of one"
        )
    else:
        guards = []
    # Of a cluster on one machine, the first node runs captures and gateways.
    first = nodes == 1 or plan.name == f"{settings.name}-n1"
    return {
        "guards": guards,
        "captures": [str(file) for file in settings.cdc] if first else [],
        "gateways": _gateways(settings, plan) if first else {},
    }


def _gateways(settings: BrokerSettings, plan: NodePlan) -> dict[str, dict[str, Any]]:
    """The settings of each gateway, by its protocol."""
    if settings.kafka is None:
        return {}
    own = {key: _plain(value) for key, value in settings.kafka_settings.items()}
    return {KAFKA: {**own, "port": plan.ports.kafka}}


def _plain(value: Any) -> Any:
    """A setting as JSON can hold it."""
    return str(value) if isinstance(value, Path) else value


def kafka_port(settings: BrokerSettings, before: int, taken: set[int]) -> int:
    """The port of the Kafka gateway: as configured, else as last time, else a free one."""
    if settings.kafka is None:
        return 0
    host = str(settings.kafka_settings.get("host", _LOOPBACK))
    if not settings.kafka:
        return free_port(host, before, taken)
    if not can_listen(host, settings.kafka):
        raise PortTaken(f"{host}:{settings.kafka}", "--kafka")
    return settings.kafka


def reloaded_kafka_port(settings: BrokerSettings, running: int) -> int:
    """The same for a broker that runs, perhaps with a gateway, which has its port already."""
    if running and settings.kafka in (0, running):
        return running
    return kafka_port(settings, 0, set())
