"""What each role may do, as subjects the server checks (pure).

The JetStream API is a set of subjects, so a permission is a list of them. Each rule is listed
twice: as it is, and with the domain prefix that a client across a leaf node uses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from millstream.broker.config import Permissions, Role, User
from millstream.guarded import GUARDED_TOKEN

__all__ = ["permissions_of"]

# Anything that destroys or changes stored events, or moves leaders: admins only.
_ADMIN_ONLY: Final = (
    "STREAM.DELETE.>",
    "STREAM.PURGE.>",
    "STREAM.UPDATE.>",
    "STREAM.MSG.DELETE.>",
    "STREAM.RESTORE.>",
    "STREAM.SNAPSHOT.>",
    "STREAM.PEER.>",
    "STREAM.LEADER.>",
    "CONSUMER.LEADER.>",
    "ACCOUNT.>",
    "META.>",
    "SERVER.>",
)

# Read-only calls. Not CONSUMER.CREATE: a consumer can deliver to any subject, which is a way to
# publish, and the same call changes other users' consumers.
_READ_ONLY: Final = (
    "INFO",
    "STREAM.NAMES",
    "STREAM.LIST",
    "STREAM.INFO.*",
    "STREAM.MSG.GET.*",
    "DIRECT.GET.>",
    "CONSUMER.NAMES.*",
    "CONSUMER.LIST.*",
    "CONSUMER.INFO.*.*",
)

# The own subjects of guarded topics: only their guard writes there.
_GUARDED: Final = f"{GUARDED_TOKEN}.>"

# A queue group gives each message to one member: joining one takes messages from the others.
_ANY_QUEUE_GROUP: Final = "> >"


def permissions_of(user: User) -> Permissions:
    """The subjects this user may publish to and subscribe to."""
    if user.permissions is not None:
        return user.permissions
    if user.role is Role.ADMIN:
        return Permissions()
    if user.role is Role.APP:
        return Permissions(publish_deny=(*_api(_ADMIN_ONLY), _GUARDED))
    if user.role is Role.TRUSTED:
        return Permissions(publish_deny=_api(_ADMIN_ONLY))
    own = [f"CONSUMER.MSG.NEXT.{stream}.{name}" for stream, name in user.subscriptions]
    acks = [f"$JS.ACK.{stream}.{name}.>" for stream, name in user.subscriptions]
    # With a domain configured, ack subjects have the domain and an account hash in front.
    acks += [f"$JS.ACK.*.*.{stream}.{name}.>" for stream, name in user.subscriptions]
    return Permissions(
        publish=(*_api(_READ_ONLY), *_api(own), *acks), subscribe_deny=(_ANY_QUEUE_GROUP,)
    )


def _api(calls: Iterable[str]) -> tuple[str, ...]:
    calls = tuple(calls)
    return tuple(f"{root}.{call}" for root in ("$JS.API", "$JS.*.API") for call in calls)
