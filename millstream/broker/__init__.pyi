"""Runs nats-server: one embedded process, a local cluster, or a broker in the background."""

from millstream.broker.background import (
    GuardState,
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
from millstream.broker.folder_users import UserInfo, list_users, user_secret
from millstream.broker.health import ConsumerHealth, Health, LogLoss, NodeHealth, StreamHealth
from millstream.broker.user_admin import add_user, remove_user

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
    "GuardState",
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
    "UserInfo",
    "add_user",
    "down",
    "find_binary",
    "kill_node",
    "list_users",
    "read_credentials",
    "read_health",
    "read_losses",
    "read_state",
    "reload_settings",
    "remove_user",
    "start_node",
    "stop_node",
    "up",
    "user_secret",
]
