"""Runs nats-server: one embedded process, a local cluster, or a broker in the background."""

from millstream.broker.background import (
    NodeState,
    State,
    down,
    kill_node,
    read_health,
    read_losses,
    read_state,
    reload_settings,
    start_node,
    stop_node,
    up,
)
from millstream.broker.binary import MINIMUM_VERSION, ServerBinary, find_binary
from millstream.broker.broker import Broker
from millstream.broker.cluster import Cluster
from millstream.broker.config import (
    DEFAULT_ACCOUNT,
    Account,
    BrokerSettings,
    ClusterSettings,
    Durability,
    Encryption,
    LeafRemote,
    LeafSettings,
    Limits,
    Permissions,
    Role,
    ServerTls,
    User,
)
from millstream.broker.credentials import Credentials, read_credentials
from millstream.broker.health import ConsumerHealth, Health, LogLoss, NodeHealth, StreamHealth

__all__ = [
    "DEFAULT_ACCOUNT",
    "MINIMUM_VERSION",
    "Account",
    "Broker",
    "BrokerSettings",
    "Cluster",
    "ClusterSettings",
    "ConsumerHealth",
    "Credentials",
    "Durability",
    "Encryption",
    "Health",
    "LeafRemote",
    "LeafSettings",
    "Limits",
    "LogLoss",
    "NodeHealth",
    "NodeState",
    "Permissions",
    "Role",
    "ServerBinary",
    "ServerTls",
    "State",
    "StreamHealth",
    "User",
    "down",
    "find_binary",
    "kill_node",
    "read_credentials",
    "read_health",
    "read_losses",
    "read_state",
    "reload_settings",
    "start_node",
    "stop_node",
    "up",
]
