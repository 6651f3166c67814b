"""The calls of tools that look at groups: DescribeGroups, ListGroups, DeleteGroups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from millstream.gateways.kafka.calls import Call, Handler
from millstream.gateways.kafka.coordinator import Coordinator
from millstream.gateways.kafka.group import ConsumerGroup
from millstream.gateways.kafka.group_members import ConsumerMember, GroupState
from millstream.gateways.kafka.offset_calls import may_join
from millstream.gateways.kafka.protocol import Api, ErrorCode

__all__ = ["GroupAdminCalls"]

_NOT_ASKED: Final = -(2**31)
_READ, _DELETE, _DESCRIBE = 3, 6, 8  # Kafka's numbers of operations
_OPERATIONS: Final = 1 << _READ | 1 << _DELETE | 1 << _DESCRIBE


class GroupAdminCalls:
    """Handlers of the calls that look at groups."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def handlers(self) -> dict[Api, Handler]:
        """Which call each of them serves."""
        return {
            Api.DESCRIBE_GROUPS: self.describe_groups,
            Api.LIST_GROUPS: self.list_groups,
            Api.DELETE_GROUPS: self.delete_groups,
        }

    async def describe_groups(self, call: Call) -> Mapping[str, Any]:
        """Groups and their members. A group that does not exist is a dead one."""
        body = call.request.body
        asked = getattr(body, "include_authorized_operations", False)
        return {"groups": [self._described(call, name, asked) for name in body.groups]}

    def _described(self, call: Call, name: str, operations: bool) -> dict[str, Any]:
        group, error = None, ErrorCode.group_authorization_failed
        if may_join(call, name):
            group, error = self._coordinator.find(name), ErrorCode.none
            if self._coordinator.offsets(name) is None:
                error = ErrorCode.coordinator_load_in_progress
        state = GroupState.DEAD if group is None else group.state
        stable = state is GroupState.STABLE
        refused = error is not ErrorCode.none
        return {
            "error_code": error,
            "group_id": name,
            "group_state": "" if refused else str(state),
            "protocol_type": "" if group is None else group.protocol_type,
            "protocol_data": (group.protocol or "") if group is not None and stable else "",
            "members": [] if group is None else [_member(group, one) for one in group.members],
            "authorized_operations": _OPERATIONS if operations and not refused else _NOT_ASKED,
        }

    async def list_groups(self, call: Call) -> Mapping[str, Any]:
        """The groups that the user may use, of some states if they are named."""
        states = {one.lower() for one in getattr(call.request.body, "states_filter", ())}
        return {
            "error_code": ErrorCode.none,
            "groups": [
                {
                    "group_id": name,
                    "protocol_type": group.protocol_type,
                    "group_state": str(group.state),
                }
                for name, group in self._coordinator.all()
                if may_join(call, name) and (not states or group.state.lower() in states)
            ],
        }

    async def delete_groups(self, call: Call) -> Mapping[str, Any]:
        """Delete groups without members, with their offsets."""
        results = []
        for name in call.request.body.groups_names:
            error = ErrorCode.group_authorization_failed
            if may_join(call, name):
                error = await self._coordinator.delete(name)
            results.append({"group_id": name, "error_code": error})
        return {"results": results}


def _member(group: ConsumerGroup, member: ConsumerMember) -> dict[str, Any]:
    stable = group.state is GroupState.STABLE
    return {
        "member_id": member.id,
        "group_instance_id": member.instance,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "member_metadata": member.metadata(group.protocol) if stable else b"",
        "member_assignment": member.assignment,
    }
