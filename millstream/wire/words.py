"""Calls of the JetStream API in Millstream's words, for errors. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["WORDINGS", "AskedFor", "Wording", "asked_for", "asked_on"]

_ADMIN: Final = "This needs the role admin"
_APP: Final = "This needs the role app (not limited to certain topics) or admin"
_READ: Final = "This needs permission to read it"
_TOPIC: Final = "topic '{0}'"
_SUBSCRIPTION: Final = "subscription '{1}' of topic '{0}'"

# Verb -> what it does to a stream {0} and a consumer {1}, and what it needs. The first that fits.
_CALLS: Final = (
    ("STREAM.CREATE", f"create {_TOPIC}", _APP),
    ("STREAM.UPDATE", f"change {_TOPIC}", _ADMIN),
    ("STREAM.DELETE", f"delete {_TOPIC}", _ADMIN),
    ("STREAM.PURGE", f"purge {_TOPIC}", _ADMIN),
    ("STREAM.MSG.DELETE", f"delete an event of {_TOPIC}", _ADMIN),
    ("STREAM.MSG.GET", f"read {_TOPIC}", _READ),
    ("STREAM.INFO", f"open {_TOPIC}", _READ),
    ("STREAM.NAMES", "list the topics", _READ),
    ("STREAM.LIST", "list the topics", _READ),
    ("STREAM.LEADER", f"move the leader of {_TOPIC}", _ADMIN),
    ("STREAM.PEER", f"move {_TOPIC} to other nodes", _ADMIN),
    ("STREAM.SNAPSHOT", f"back up {_TOPIC}", _ADMIN),
    ("STREAM.RESTORE", f"restore {_TOPIC}", _ADMIN),
    ("DIRECT.GET", f"read {_TOPIC}", _READ),
    ("CONSUMER.CREATE", f"create or change {_SUBSCRIPTION}", _APP),
    ("CONSUMER.DELETE", f"delete {_SUBSCRIPTION}", _APP),
    ("CONSUMER.RESET", f"move {_SUBSCRIPTION}", _APP),
    ("CONSUMER.PAUSE", f"pause or resume {_SUBSCRIPTION}", _APP),
    ("CONSUMER.MSG.NEXT", f"receive from {_SUBSCRIPTION}", _APP),
    ("CONSUMER.INFO", f"look at {_SUBSCRIPTION}", _READ),
    ("CONSUMER.NAMES", f"list the subscriptions of {_TOPIC}", _READ),
    ("CONSUMER.LIST", f"list the subscriptions of {_TOPIC}", _READ),
    ("CONSUMER.LEADER", f"move the leader of {_SUBSCRIPTION}", _ADMIN),
    ("ACCOUNT", "manage the account", _ADMIN),
    ("META", "manage the cluster", _ADMIN),
    ("SERVER", "manage the cluster", _ADMIN),
)
_API: Final = re.compile(r"\$JS\.(?:[^.]+\.)?API\.(.+)")
_ACK: Final = re.compile(r"\$JS\.ACK\.(?:[^.]+\.[^.]+\.(?=(?:[^.]+\.){7}))?([^.]+)\.([^.]+)\..*")


class AskedFor(NamedTuple):
    """What a call does, such as `create topic 'orders'`, and which user may do it."""

    action: str
    needs: str


def asked_for(verb: str) -> AskedFor | None:
    """What a verb of the API such as `STREAM.CREATE.orders` asks for; None: none of ours."""
    for start, text, needs in _CALLS:
        if verb == start or verb.startswith(f"{start}."):
            names = verb[len(start) + 1 :].split(".")
            if "{1}" in text and len(names) < 2:
                text = text.replace(_SUBSCRIPTION, f"a subscription of {_TOPIC}")
            return AskedFor(text.format(*names, ""), needs)
    return None


def asked_on(subject: str) -> AskedFor | None:
    """What a message to this subject asks for; None: it is not a call of the API."""
    if (call := _API.fullmatch(subject)) is not None:
        return asked_for(call[1])
    if (ack := _ACK.fullmatch(subject)) is not None:
        return AskedFor(f"settle events of subscription '{ack[2]}' of topic '{ack[1]}'", _APP)
    return None


class Wording(NamedTuple):
    """What the server found, and what to do."""

    found: str = ""  # "" for the server's own words
    advice: str = ""


_QUEUE_ADVICE: Final = (
    "A work queue gives each event to one subscription: join the existing one, whose members share "
    "the events, or choose keys or subjects that no other subscription has"
)
_NODES_DOWN: Final = "All nodes that keep it are down: start them, see 'millstream status'"
_AGAIN: Final = "Try again in a moment; 'millstream status' shows whether all nodes are up"

# By the server's number, which does not change with its version.
WORDINGS: Final[Mapping[int, Wording]] = {
    # -- the broker
    10008: Wording("the broker is starting or electing a leader", _AGAIN),
    10009: Wording("the broker is starting or electing a leader", _AGAIN),
    10163: Wording("another write to this key is under way", _AGAIN),
    10167: Wording("the broker has too many requests at the moment", _AGAIN),
    10039: Wording(
        "this account stores nothing",
        "JetStream is not enabled for it: connect as a user of another account, or enable it",
    ),
    10076: Wording(
        "this server stores nothing",
        "JetStream is not enabled: connect to a broker of 'millstream up' or start nats-server -js",
    ),
    # -- limits
    10002: Wording(
        "the account's limit is used up", "Purge or delete topics, or raise the account's limit"
    ),
    10023: Wording(
        "the broker's storage limit is used up", "Purge or delete topics, or raise the limit"
    ),
    10028: Wording(
        "the broker's memory limit is used up", "Delete topics in memory, or raise the limit"
    ),
    10047: Wording(
        "the broker's storage limit is used up", "Purge or delete topics, or raise the limit"
    ),
    10077: Wording(advice="Make room (purge, retention) or raise the limit"),
    10026: Wording(
        "the topic or the account has as many subscriptions as it may have",
        "Delete subscriptions that nobody uses, or raise max_subscriptions",
    ),
    10027: Wording(
        "the account has as many topics as it may have",
        "Delete topics, or raise max_streams of the account; each partition counts",
    ),
    10113: Wording("topics of this account need a size limit", "Create it with max_bytes"),
    10120: Wording(
        "the account has no room for topics with that many replicas", "Choose other replicas"
    ),
    10122: Wording(
        "max_bytes is more than this account allows for one topic", "Choose a smaller max_bytes"
    ),
    10054: Wording(
        "the event is larger than max_message_size of the topic",
        "Publish a smaller value, or raise max_message_size",
    ),
    10097: Wording("the headers are larger than 64 KiB", "Put what they hold into the value"),
    10121: Wording("max_in_flight is more than the broker allows", "Choose a smaller one"),
    # -- replicas and nodes
    10074: Wording(
        "this broker is a single node",
        "Replicas need a cluster: millstream up --nodes 3",
    ),
    10005: Wording(advice="The cluster has fewer nodes than the replicas asked for"),
    10118: Wording("the topic is offline", _NODES_DOWN),
    10194: Wording("the topic is offline", _NODES_DOWN),
    10119: Wording("the subscription is offline", _NODES_DOWN),
    10195: Wording("the subscription is offline", _NODES_DOWN),
    # -- topics
    10071: Wording(advice="Another writer was first: read the last event again, then decide again"),
    10059: Wording("there is no such topic or stream", "Create it first, or check the name"),
    10058: Wording("it exists with other settings", "Open it as it is, or change it on purpose"),
    10065: Wording(
        "another topic or stream stores the same subjects",
        "Choose another name or prefix; 'millstream topic ls' shows what there is",
    ),
    10052: Wording(advice="Some settings cannot be changed after a topic was created"),
    10109: Wording("the topic is sealed", "Nothing can be stored in it or removed from it"),
    10057: Wording(advice="A topic with deny_delete keeps every event"),
    10110: Wording(advice="A topic with deny_purge keeps every event"),
    10166: Wording(
        "the topic does not allow events with a ttl",
        "Turn it on: edit_topic(..., message_ttl=True)",
    ),
    10165: Wording("the ttl of the event is not valid", "Use whole seconds, at least one"),
    10174: Wording(
        "the topic does not store several events together",
        "Turn it on: edit_topic(..., atomic=True)",
    ),
    10188: Wording(
        "the topic takes no scheduled events", "Turn it on: edit_topic(..., schedules=True)"
    ),
    10199: Wording("too many events to store together", "Store at most 1,000 at a time"),
    # -- subscriptions
    10014: Wording("there is no such subscription", "Create it first, or check the name"),
    10149: Wording("there is no such subscription", "Create it first, or check the name"),
    10013: Wording("it exists with other settings"),
    10148: Wording("it exists with other settings"),
    10084: Wording(
        "the topic is a work queue, whose subscriptions ack each event", "Use ack='explicit'"
    ),
    10098: Wording(
        "the topic is a work queue, whose subscriptions ack each event", "Use ack='explicit'"
    ),
    10099: Wording("the topic is a work queue and has a subscription already", _QUEUE_ADVICE),
    10100: Wording(
        "another subscription of this work queue takes some of the same events", _QUEUE_ADVICE
    ),
    10101: Wording(
        "a subscription of a work queue starts with the first event", "Use start=Start.ALL"
    ),
    10093: Wording(
        "its keys or subjects match nothing that the topic stores", "Check them, or leave them out"
    ),
    10138: Wording("its keys or subjects overlap each other", "Leave out what others include"),
    10105: Wording(
        "another client reads from it at this moment", "Stop it first, or use another name"
    ),
}
