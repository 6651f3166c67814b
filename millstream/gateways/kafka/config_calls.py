"""The calls about settings: DescribeConfigs, AlterConfigs, IncrementalAlterConfigs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import MillstreamError
from millstream.gateways.kafka.calls import Call, Handler
from millstream.gateways.kafka.catalog import TopicCatalog
from millstream.gateways.kafka.kafka_topic import TopicRefused
from millstream.gateways.kafka.protocol import Api, ErrorCode
from millstream.gateways.kafka.topic_configs import (
    BadConfig,
    ConfigEntry,
    broker_entries,
    changes_for,
    entries_of,
    reset_by,
)
from millstream.gateways.kafka.topic_rights import (
    access_of,
    managed_topic,
    refusal_of,
    seen_topic,
)
from millstream.messaging import TopicSettings
from millstream.messaging.topics.lookup import side_by_side

if TYPE_CHECKING:
    from millstream.gateways.access import Access

__all__ = ["ConfigCalls", "answer_of", "config_fields"]

_TOPIC, _BROKER = 2, 4  # types of resources
_SET, _DELETE = 0, 1  # operations of an incremental change

_FIXED_AT_START: Final = (
    "the settings of a gateway are given when it is started: millstream gateway run kafka"
)


class ConfigCalls:
    """Handlers of the calls about settings."""

    def __init__(
        self,
        catalog: TopicCatalog,
        node_id: int,
        partitions: int,
        auto_create: bool,
        bytes_max: int,
    ) -> None:
        self._catalog = catalog
        self._node_id = node_id
        self._broker = broker_entries(node_id, partitions, auto_create)
        self._bytes_max = bytes_max  # of a batch

    def handlers(self) -> dict[Api, Handler]:
        """Which call each of them serves."""
        return {
            Api.DESCRIBE_CONFIGS: self.describe,
            Api.ALTER_CONFIGS: self.alter,
            Api.INCREMENTAL_ALTER_CONFIGS: self.alter_some,
        }

    async def describe(self, call: Call) -> dict[str, Any]:
        """The settings of topics, and of the gateway as a broker."""
        access = access_of(call)

        async def one(resource: Any) -> dict[str, Any]:
            answer = _resource(resource)
            try:
                entries = await self._entries(access, resource)
            except TopicRefused as refused:
                return answer | _failed(refused) | {"configs": ()}
            except MillstreamError as error:
                return answer | _failed(refusal_of(error)) | {"configs": ()}
            wanted = resource.configuration_keys  # none: all
            shown = [entry for entry in entries if not wanted or entry.name in wanted]
            return answer | {
                "error_code": ErrorCode.none,
                "error_message": None,
                "configs": config_fields(shown),
            }

        return {"results": await side_by_side(one, call.request.body.resources)}

    async def _entries(self, access: Access, resource: Any) -> Sequence[ConfigEntry]:
        name = resource.resource_name
        if resource.resource_type == _TOPIC:
            topic = await seen_topic(self._catalog, access, name)
            return entries_of(topic.info.settings)
        if resource.resource_type != _BROKER:
            raise _no_such_resource(resource)
        if not name:
            return ()  # what is set for all brokers: nothing
        if name != str(self._node_id):
            text = f"Unexpected broker id, expected {self._node_id} or empty string, not {name:.20}"
            raise TopicRefused(ErrorCode.invalid_request, text)
        return self._broker

    # -- changing -------------------------------------------------------------------------

    async def alter(self, call: Call) -> dict[str, Any]:
        """Replace all settings of topics: those that are not named get their defaults."""

        def edit_of(resource: Any) -> Callable[[TopicSettings], Mapping[str, Any]]:
            given = {one.name: one.value for one in resource.configs}
            _check_values(resource.configs, given)
            return lambda settings: changes_for(settings, given, reset_by(given), self._bytes_max)

        return await self._alter(call, edit_of)

    async def alter_some(self, call: Call) -> dict[str, Any]:
        """Change some settings of topics; the others stay."""

        def edit_of(resource: Any) -> Callable[[TopicSettings], Mapping[str, Any]]:
            for one in resource.configs:
                if one.config_operation not in (_SET, _DELETE):
                    raise TopicRefused(
                        ErrorCode.invalid_config,
                        f"{one.name:.100}: a setting is set or deleted as a whole; nothing can be "
                        f"appended to it or subtracted from it",
                    )
            changed = [one for one in resource.configs if one.config_operation == _SET]
            given = {one.name: one.value for one in changed}
            _check_values(changed, given)
            names = [one.name for one in resource.configs]
            reset = [one.name for one in resource.configs if one.config_operation == _DELETE]
            if len(set(names)) != len(names):
                text = "Error due to duplicate config keys"
                raise TopicRefused(ErrorCode.invalid_request, text)
            return lambda settings: changes_for(settings, given, reset, self._bytes_max)

        return await self._alter(call, edit_of)

    async def _alter(
        self, call: Call, edit_of: Callable[[Any], Callable[[TopicSettings], Mapping[str, Any]]]
    ) -> dict[str, Any]:
        access, body = access_of(call), call.request.body
        count = Counter((one.resource_type, one.resource_name) for one in body.resources)

        async def change(resource: Any) -> None:
            if count[resource.resource_type, resource.resource_name] > 1:
                text = "Each resource must appear at most once."
                raise TopicRefused(ErrorCode.invalid_request, text)
            if resource.resource_type == _BROKER:
                raise TopicRefused(ErrorCode.invalid_request, _FIXED_AT_START)
            if resource.resource_type != _TOPIC:
                raise _no_such_resource(resource)
            topic = await managed_topic(self._catalog, access, resource.resource_name)
            edit = edit_of(resource)
            await self._catalog.alter(topic, edit, validate_only=body.validate_only)

        async def one(resource: Any) -> dict[str, Any]:
            return _resource(resource) | await answer_of(change(resource))

        return {"responses": await side_by_side(one, body.resources)}


async def answer_of(work: Awaitable[None]) -> dict[str, Any]:
    """The code and message of a change."""
    try:
        await work
    except TopicRefused as refused:
        return _failed(refused)
    except BadConfig as error:
        return _failed(TopicRefused(ErrorCode.invalid_config, str(error)))
    except MillstreamError as error:
        return _failed(refusal_of(error))
    return {"error_code": ErrorCode.none, "error_message": None}


def config_fields(entries: Sequence[ConfigEntry]) -> list[dict[str, Any]]:
    """Settings as the fields of an answer."""
    return [
        {
            "name": entry.name,
            "value": entry.value,
            "read_only": entry.read_only,
            "config_source": int(entry.source),
            "is_sensitive": False,
            "synonyms": (),
            "config_type": int(entry.type),
            "documentation": None,
        }
        for entry in entries
    ]


def _check_values(configs: Sequence[Any], given: Mapping[str, str | None]) -> None:
    if len(given) != len(configs):
        raise TopicRefused(ErrorCode.invalid_request, "Error due to duplicate config keys")
    missing = ", ".join(name for name, value in given.items() if value is None)
    if missing:
        text = f"Null value not supported for : {missing:.200}"
        raise TopicRefused(ErrorCode.invalid_request, text)


def _no_such_resource(resource: Any) -> TopicRefused:
    text = f"Unsupported resource type {resource.resource_type}: topics (2) and brokers (4) are"
    return TopicRefused(ErrorCode.invalid_request, text)


def _resource(resource: Any) -> dict[str, Any]:
    return {"resource_type": resource.resource_type, "resource_name": resource.resource_name}


def _failed(refused: TopicRefused) -> dict[str, Any]:
    return {"error_code": refused.code, "error_message": refused.text}
