"""Which services answer, and what they have done: asked the standard NATS way (ADR-32).

Finds the services of any NATS client. Only instances that answer in time are found.
"""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec

from millstream.errors import NoResponders, RequestTimeout
from millstream.events.subject import check_name
from millstream.messaging.core.request import ANSWERS_MAX, QUIET_SECONDS, gather
from millstream.messaging.core.service import DISCOVERY_PREFIX, EndpointStats
from millstream.wire.aio.connection import Connection

__all__ = ["EndpointInfo", "ServiceInfo", "ServiceStats", "discover"]

_log = logging.getLogger("millstream.messaging")


class EndpointInfo(msgspec.Struct, kw_only=True):
    """One subject that an instance of a service answers on."""

    name: str
    subject: str
    queue_group: str = ""
    metadata: dict[str, str] | None = None


class ServiceInfo(msgspec.Struct, kw_only=True):
    """One instance of a service, as it describes itself."""

    name: str
    id: str
    version: str
    description: str = ""
    metadata: dict[str, str] | None = None
    endpoints: list[EndpointInfo] | None = None  # None: it does not say


class ServiceStats(msgspec.Struct, kw_only=True):
    """What one instance of a service has done since it started."""

    name: str
    id: str
    version: str
    started: str = ""  # when, as RFC 3339 text
    metadata: dict[str, str] | None = None
    endpoints: list[EndpointStats] | None = None  # None: it does not say


S = TypeVar("S", ServiceInfo, ServiceStats)


async def discover(
    connection: Connection,
    kind: type[S],
    name: str | None = None,
    *,
    limit: int = ANSWERS_MAX,
    quiet: float = QUIET_SECONDS,
    timeout: float | None = None,
) -> list[S]:
    """What the instances of a service, or of all services, report; sorted by name and id."""
    subject = f"{DISCOVERY_PREFIX}.{'INFO' if kind is ServiceInfo else 'STATS'}"
    if name is not None:
        subject = f"{subject}.{check_name('service', name)}"
    try:
        answers = await gather(connection, subject, limit=limit, quiet=quiet, timeout=timeout)
    except (NoResponders, RequestTimeout):
        return []
    found: list[S] = []
    for answer in answers:
        try:
            found.append(msgspec.json.decode(answer.data, type=kind))
        except msgspec.MsgspecError as error:
            _log.warning("a service answered to %s with something else: %s", subject, error)
    return sorted(found, key=lambda one: (one.name, one.id))
