"""The calls of groups' members: FindCoordinator, JoinGroup, SyncGroup, Heartbeat, LeaveGroup."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from millstream.gateways.kafka.calls import Call, Handler
from millstream.gateways.kafka.coordinator import Coordinator
from millstream.gateways.kafka.group_admin_calls import GroupAdminCalls
from millstream.gateways.kafka.group_members import (
    Caller,
    JoinAsk,
    Joined,
    Protocol,
    SyncAsk,
    Synced,
)
from millstream.gateways.kafka.offset_calls import OffsetCalls, may_join
from millstream.gateways.kafka.protocol import Api, ErrorCode

if TYPE_CHECKING:
    from millstream.gateways.kafka.catalog import TopicCatalog

__all__ = ["GroupCalls"]

_GROUP_KEY, _TRANSACTION_KEY = 0, 1  # what FindCoordinator asks for
# From these versions of JoinGroup on, a client can join again with the id that it was given, and
# can be a leader that assigns nothing.
_ID_VERSION: Final = 4
_SKIP_VERSION: Final = 9
_CLIENT_ID_MAX: Final = 256  # characters that are kept
_ID_START_MAX: Final = 100


class GroupCalls:
    """Handlers of all calls of groups. `node` is what clients are sent to: id, host and port."""

    def __init__(
        self, coordinator: Coordinator, catalog: TopicCatalog, node: tuple[int, str, int]
    ) -> None:
        self._coordinator = coordinator
        self._node = node
        self._offsets = OffsetCalls(coordinator, catalog)
        self._admin = GroupAdminCalls(coordinator)

    def handlers(self) -> dict[Api, Handler]:
        """Which call each of them serves."""
        return {
            Api.FIND_COORDINATOR: self.find_coordinator,
            Api.JOIN_GROUP: self.join_group,
            Api.SYNC_GROUP: self.sync_group,
            Api.HEARTBEAT: self.heartbeat,
            Api.LEAVE_GROUP: self.leave_group,
            **self._offsets.handlers(),
            **self._admin.handlers(),
        }

    # -- FindCoordinator ------------------------------------------------------------------

    async def find_coordinator(self, call: Call) -> Mapping[str, Any]:
        """This gateway has all groups and all transactions."""
        body = call.request.body
        kind = getattr(body, "key_type", _GROUP_KEY)
        if call.request.version >= 4:
            return {"coordinators": [self._located(call, kind, k) for k in body.coordinator_keys]}
        return self._located(call, kind, body.key)

    def _located(self, call: Call, kind: int, key: str) -> dict[str, Any]:
        error = ErrorCode.none
        if kind == _GROUP_KEY:
            if not may_join(call, key):
                error = ErrorCode.group_authorization_failed
        elif kind != _TRANSACTION_KEY:
            error = ErrorCode.invalid_request
        node, host, port = self._node if error is ErrorCode.none else (-1, "", -1)
        return {
            "key": key,
            "node_id": node,
            "host": host,
            "port": port,
            "error_code": error,
            "error_message": None,
        }

    # -- members --------------------------------------------------------------------------

    async def join_group(self, call: Call) -> Mapping[str, Any]:
        """A client becomes or stays a member; answered when the next generation begins."""
        body = call.request.body
        if may_join(call, body.group_id):
            found = await self._coordinator.join(body.group_id, _join_ask(call))
        else:
            found = Joined(ErrorCode.group_authorization_failed, body.member_id)
        # Versions before 7 have no null.
        nothing = None if call.request.version >= 7 else ""
        return {
            "error_code": found.error,
            "generation_id": found.generation,
            "protocol_type": found.protocol_type,
            "protocol_name": nothing if found.protocol is None else found.protocol,
            "leader": found.leader,
            "skip_assignment": found.skip,
            "member_id": found.member_id,
            "members": [
                {
                    "member_id": one.member_id,
                    "group_instance_id": one.instance,
                    "metadata": one.metadata,
                }
                for one in found.members
            ],
        }

    async def sync_group(self, call: Call) -> Mapping[str, Any]:
        """A member gets its assignment; the leader brings those of all."""
        body = call.request.body
        if may_join(call, body.group_id):
            ask = SyncAsk(
                _caller(body),
                getattr(body, "protocol_type", None),
                getattr(body, "protocol_name", None),
                {one.member_id: one.assignment for one in body.assignments},
            )
            found = await self._coordinator.sync(body.group_id, ask)
        else:
            found = Synced(ErrorCode.group_authorization_failed)
        return {
            "error_code": found.error,
            "protocol_type": found.protocol_type,
            "protocol_name": found.protocol,
            "assignment": found.assignment,
        }

    async def heartbeat(self, call: Call) -> Mapping[str, Any]:
        """A member is alive, and learns if it has to join again."""
        body = call.request.body
        if not may_join(call, body.group_id):
            return {"error_code": ErrorCode.group_authorization_failed}
        return {"error_code": self._coordinator.heartbeat(body.group_id, _caller(body))}

    async def leave_group(self, call: Call) -> Mapping[str, Any]:
        """Members leave, or an admin removes static ones."""
        body = call.request.body
        if not may_join(call, body.group_id):
            return {"error_code": ErrorCode.group_authorization_failed, "members": ()}
        if call.request.version < 3:
            leave = self._coordinator.leave
            return {"error_code": leave(body.group_id, body.member_id, None)}
        return {
            "error_code": ErrorCode.none,
            "members": self._left(body.group_id, body.members),
        }

    def _left(self, group: str, members: Iterable[Any]) -> list[dict[str, Any]]:
        return [
            {
                "member_id": one.member_id,
                "group_instance_id": one.group_instance_id,
                "error_code": self._coordinator.leave(group, one.member_id, one.group_instance_id),
            }
            for one in members
        ]


def _caller(body: Any) -> Caller:
    instance = getattr(body, "group_instance_id", None)
    return Caller(body.member_id, body.generation_id, instance)


def _join_ask(call: Call) -> JoinAsk:
    request = call.request
    body = request.body
    session = body.session_timeout.total_seconds()
    rebalance = session
    if request.version >= 1:
        rebalance = body.rebalance_timeout.total_seconds()
    instance = getattr(body, "group_instance_id", None)
    start = instance or request.client_id or "consumer"
    return JoinAsk(
        member_id=body.member_id,
        new_id=f"{start[:_ID_START_MAX]}-{uuid.uuid4()}",
        instance=instance,
        client_id=request.client_id[:_CLIENT_ID_MAX],
        client_host=f"/{call.session.client_host}",
        session=session,
        rebalance=rebalance if rebalance > 0 else session,
        protocol_type=body.protocol_type,
        protocols=tuple(Protocol(one.name, bytes(one.metadata)) for one in body.protocols),
        requires_id=request.version >= _ID_VERSION,
        may_skip=request.version >= _SKIP_VERSION,
    )
