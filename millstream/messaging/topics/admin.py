"""Declare, open, change and delete topics over the JetStream API.

A topic of several partitions is several streams, and no request spans them. Each call therefore
works in an order that another run of the same call can resume after a crash: partition 0 is created
first and deleted last, so it exists exactly when anything of the topic does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from millstream.errors import (
    ApiError,
    ConfigError,
    IncompleteList,
    NoResponders,
    PermissionDenied,
    RequestTimeout,
    TopicConflict,
    TopicNotFound,
)
from millstream.events.subject import check_name
from millstream.messaging.topics.demand import shortfall
from millstream.messaging.topics.differences import conflict, differences
from millstream.messaging.topics.durability import check_health, durability_of, shortfall_of
from millstream.messaging.topics.forgetting import update_noted
from millstream.messaging.topics.info import TopicInfo, topic_info
from millstream.messaging.topics.lookup import (
    find_stream,
    find_streams,
    list_topics,
    missing_topic,
    open_topic,
    side_by_side,
    streams_of,
)
from millstream.messaging.topics.placement import (
    create_spread,
    spread_leaders,
    without_placement,
)
from millstream.messaging.topics.purging import Purge, purge
from millstream.messaging.topics.setting_rules import RESERVED_TOKENS
from millstream.messaging.topics.settings import Origin, TopicSettings
from millstream.messaging.topics.stream_config import (
    VERSION,
    StreamIdentity,
    changed_config,
    identity_of,
    own_prefix,
    resolved,
    to_stream_configs,
)
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import ErrorCode, StreamInfo

__all__ = [
    "Purge",
    "declare",
    "delete",
    "edit",
    "list_topics",
    "open_topic",
    "promote",
    "purge",
]

# An origin beyond a leaf node that is not connected never answers; do not wait long.
ORIGIN_SECONDS: Final = 2.0
_SUBJECTS_OVERLAP: Final = 10065
_CREATE_FAILED: Final = 10049

# -- declaring ----------------------------------------------------------------------------


async def declare(js: JetStream, name: str, settings: TopicSettings | None = None) -> TopicInfo:
    """Make sure that a topic with these settings exists; may be repeated and run concurrently.

    1. Look up what exists. 2. The same settings: nothing is done; others: TopicConflict.
    3. Look up the origins of a copy. 4. Create the partitions that are missing, 0 first.

    Before a topic is created, the server is asked for its health if this user may ask (it raises
    Unhealthy). On servers that others operate this must be granted, see `check_health`; without it,
    do not declare topics on a server that may run with a wrong key.
    """
    check_name("topic", name)
    settings = settings or TopicSettings()
    if settings.subject_prefix(name) in RESERVED_TOKENS:
        raise ConfigError(
            f"topic name '{name}': its subjects would be the entrance of guarded topics. Choose "
            f"another name or a prefix"
        )
    found = await find_streams(js, name)
    if found:
        _check_same(name, settings, found)
        info = topic_info(name, found)
        if not info.missing:
            return await _durable(js, info)
        settings = info.settings
    else:
        settings = await _with_origins(js, settings)
    configs = to_stream_configs(name, settings)
    await _check_free(js, name, configs, found)
    await check_health(js)
    if settings.durability is not None and settings.replicas == 1:
        await _check_server(js, name, settings.durability, configs[0])
    there = {info.config["name"]: info for info in found}
    for config in configs[:1]:
        if config["name"] not in there:
            there[config["name"]] = await _create(js, name, config, settings)
    rest = [config for config in configs if config["name"] not in there]
    created = await create_spread(
        js, lambda config: _create(js, name, config, settings), rest, there.values()
    )
    streams = [*there.values(), *created]
    try:
        if await spread_leaders(js, streams):
            streams = await find_streams(js, name)
    except (ApiError, PermissionDenied, RequestTimeout, NoResponders):
        pass  # it works wherever the leaders are; an admin can move them later
    return await _durable(js, topic_info(name, streams))


async def _check_server(js: JetStream, name: str, demanded: str, config: Mapping[str, Any]) -> None:
    """Refuse before anything is created; in a cluster the own server speaks for the others."""
    own = js.connection.info.server_name if js.connection.info.cluster else None
    error = shortfall(name, demanded, [await durability_of(js, config, own)])
    if error is not None:
        raise error


async def _durable(js: JetStream, info: TopicInfo) -> TopicInfo:
    """The topic, if its servers store as durably as it demands."""
    error = await shortfall_of(js, info)
    if error is not None:
        raise error
    return info


def _check_same(name: str, wanted: TopicSettings, found: Sequence[StreamInfo]) -> None:
    _check_ours(name, found[0], "declare")
    for info in found:
        others = differences(wanted, topic_info(name, [info]).settings)
        if others:
            raise conflict(name, others, "exists with other settings")


def _check_ours(name: str, info: StreamInfo, doing: str) -> StreamIdentity:
    identity = identity_of(info.config)
    if identity.topic != name:
        raise _part_of(name, identity)
    if not identity.managed:
        raise TopicConflict(
            0,
            ErrorCode.STREAM_NAME_IN_USE,
            f"cannot {doing} topic '{name}': there is a JetStream stream of this name that "
            f"Millstream did not declare, with subjects {_subjects(info.config)}",
            "Open it as it is, or choose another name",
        )
    if identity.version > VERSION:
        raise TopicConflict(
            0,
            ErrorCode.STREAM_NAME_IN_USE,
            f"cannot {doing} topic '{name}': it has the layout {identity.version} of a newer "
            f"Millstream, this one knows {VERSION}",
            "Upgrade Millstream",
        )
    return identity


async def _check_free(
    js: JetStream, name: str, configs: Sequence[Mapping[str, Any]], found: Sequence[StreamInfo]
) -> None:
    """Refuse, before anything is created, if a stream of another topic has one of the names."""
    known = {info.config["name"] for info in found}
    names = [config["name"] for config in configs if config["name"] not in known]
    for info in await side_by_side(lambda stream: find_stream(js, stream), names):
        if info is not None and identity_of(info.config).topic != name:
            raise _name_taken(name, info)


def _name_taken(name: str, info: StreamInfo) -> TopicConflict:
    identity, stream = identity_of(info.config), info.config["name"]
    owner = f"belongs to the topic '{identity.topic}'"
    if not identity.managed:
        owner = f"is another JetStream stream, with subjects {_subjects(info.config)}"
    return TopicConflict(
        0,
        ErrorCode.STREAM_NAME_IN_USE,
        f"topic '{name}' needs the stream '{stream}', which {owner}",
        "Choose another name or another number of partitions",
    )


async def _create(
    js: JetStream, name: str, config: dict[str, Any], settings: TopicSettings
) -> StreamInfo:
    try:
        return await js.create_stream(config)
    except ApiError as error:
        if error.err_code == ErrorCode.MAX_CONSUMERS and settings.max_subscriptions is None:
            return await js.create_stream({**config, "max_consumers": -1})
        if error.err_code == _CREATE_FAILED:
            # The server may be removing the folder of the account, whose last stream was deleted.
            return await js.create_stream(config)
        if error.err_code == _SUBJECTS_OVERLAP:
            raise await _overlap(js, name, config["subjects"][0], error) from error
        if error.err_code == ErrorCode.STREAM_NAME_IN_USE:
            info = await find_stream(js, config["name"])
            if info is not None and identity_of(info.config).topic != name:
                raise _name_taken(name, info) from error
            if info is not None:  # another client is declaring the same topic right now
                _check_same(name, settings, [info])
                return info
        raise


async def _overlap(js: JetStream, name: str, subjects: str, error: ApiError) -> TopicConflict:
    try:
        taken = [c for c in await js.stream_configs(subjects) if c["name"] != name]
    except IncompleteList:  # it would only be named
        taken = []
    owners = ", ".join(f"'{config['name']}' ({_subjects(config)})" for config in taken[:3])
    return TopicConflict(
        0,
        error.err_code,
        f"topic '{name}' needs the subjects {subjects}, which are taken by the stream "
        f"{owners or 'of another topic'}",
        "Choose another name or prefix, or delete that stream first",
    )


def _subjects(config: Mapping[str, Any]) -> str:
    return ", ".join(config.get("subjects") or ()) or "of its origin"


async def _with_origins(js: JetStream, settings: TopicSettings) -> TopicSettings:
    """The settings with everything known about the topics that are copied."""
    changes: dict[str, Any] = {}
    if settings.mirror is not None:
        changes["mirror"] = await _origin(js, settings.mirror)
    if settings.sources:
        changes["sources"] = [await _origin(js, origin) for origin in settings.sources]
    return settings.changed(changes)


async def _origin(js: JetStream, origin: Origin) -> Origin:
    if origin.partitions is not None:
        return origin
    there = JetStream(js.connection, origin.domain) if origin.domain else js
    where = f" in the domain '{origin.domain}'" if origin.domain else ""
    advice = "Create it first, or describe it with Origin(..., partitions=N)"
    try:
        found = await find_streams(there, origin.topic, ORIGIN_SECONDS)
    except (RequestTimeout, NoResponders) as error:
        raise TopicNotFound(
            0,
            ErrorCode.STREAM_NOT_FOUND,
            f"the origin '{origin.topic}'{where} cannot be reached: {error}",
            advice,
        ) from error
    if not found:
        text = f"there is no topic '{origin.topic}'{where} to copy from"
        raise await missing_topic(there, origin.topic, text, advice)
    return resolved(origin, found[0].config)


# -- changing -----------------------------------------------------------------------------


async def edit(js: JetStream, name: str, changes: Mapping[str, Any]) -> TopicInfo:
    """Change some settings; the others stay, including those that Millstream does not know.

    Everything is checked first; a change that the server cannot make raises TopicConflict and
    nothing is changed. Repeating it after a crash changes the remaining partitions.
    """
    found = await _complete(js, name)
    wanted = {}
    for info in found:
        settings = topic_info(name, [info]).settings
        if "history" in changes and not settings.is_copy:
            changes = {**changes, "packs": _without_packs(name, settings)}
        wanted[info.config["name"]] = settings.changed(changes)
        fixed = [
            difference
            for difference in differences(wanted[info.config["name"]], settings)
            if not difference.changeable
        ]
        if fixed:
            raise conflict(name, fixed, "cannot be changed like this")
    demand = changes.get("durability")
    if demand is not None and demand != "replicated":  # for that, the settings must have replicas
        before = topic_info(name, found)
        after = before.settings.changed({"durability": demand}, check=False)
        await _durable(js, replace(before, settings=after))
    resolved_once = {s: await _with_origins(js, s) for s in set(wanted.values())}
    updates = []
    for info in found:
        after = resolved_once[wanted[info.config["name"]]]
        updates.append(_updated(name, info, after))
    changed = await side_by_side(lambda pair: _update(js, name, *pair), updates)
    return topic_info(name, changed)


def _without_packs(name: str, settings: TopicSettings) -> bool:
    """Whether a topic whose history changes takes packs: no, so that it takes none after it."""
    if settings.takes_packs:
        raise ConfigError(
            f"history: topic '{name}' takes packs, and the broker does not see the keys in them, "
            f"so it would remove packs with events of other keys. Create a topic of another name "
            f"with the history and replay this one into it"
        )
    return False


async def promote(js: JetStream, name: str, *, allow_lag: bool = False) -> TopicInfo:
    """Make a mirror a normal topic, which continues at the next offset under the same subjects.

    Use it when the origin is gone: while it exists, in the same domain, its subjects are taken. In
    another domain it must not come back unchanged, or both would store what is published. Events
    that were not copied yet are lost, so a mirror that is known to lag is refused unless
    `allow_lag`. Partitions that were promoted before are skipped, so it may be repeated.
    """
    found = await _complete(js, name)
    _check_ours(name, found[0], "promote")
    info = topic_info(name, found)
    mirrors = [stream for stream in found if stream.config.get("mirror")]
    if not mirrors:
        raise ConfigError(f"topic '{name}' is not a mirror, so it cannot be promoted")
    if any(topic_info(name, [stream]).prefix is None for stream in mirrors):
        raise ConfigError(
            f"topic '{name}' mirrors a stream that is not a topic, so its subjects are unknown. "
            f"Make it one with STREAM.UPDATE: remove the mirror and set the subjects"
        )
    if info.lag and not allow_lag:
        raise TopicConflict(
            0,
            ErrorCode.STREAM_NAME_IN_USE,
            f"the mirror '{name}' is {info.lag:,} messages behind its origin",
            "Wait until it has caught up, or promote it with allow_lag=True and lose them",
        )
    for stream in mirrors:
        settings = topic_info(name, [stream]).settings
        # Unchecked: the copy of a guarded topic is guarded, and gets its schema afterwards.
        own = own_prefix(name, settings.subject_prefix(name))
        packs = {} if settings.mirror is None or settings.mirror.packs else {"packs": False}
        after = settings.changed({"mirror": None, **own, **packs}, check=False)
        await _update(js, name, *_updated(name, stream, after))
    return await open_topic(js, name)


async def _complete(js: JetStream, name: str) -> list[StreamInfo]:
    """The streams of a topic that is complete and may be changed under this name."""
    found = await streams_of(js, name)
    identity = identity_of(found[0].config)
    if identity.topic != name:
        raise _part_of(name, identity)
    if len(found) != identity.partitions:
        await open_topic(js, name)  # reports which partitions are missing
    if identity.managed:
        _check_ours(name, found[0], "change")
    return found


def _part_of(name: str, identity: StreamIdentity) -> TopicConflict:
    return TopicConflict(
        0,
        ErrorCode.STREAM_NAME_IN_USE,
        f"'{name}' is partition {identity.partition} of the topic '{identity.topic}'",
        f"Use the topic '{identity.topic}' instead",
    )


def _updated(
    name: str, info: StreamInfo, after: TopicSettings
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """A stream's configuration and what it has to become."""
    before = topic_info(name, [info]).settings
    number = identity_of(info.config).partition
    # A foreign stream may have a name that a topic may not have; only the difference counts.
    shown = name if identity_of(info.config).managed else "stream"
    had, gets = (to_stream_configs(shown, settings)[number] for settings in (before, after))
    if identity_of(info.config).managed:  # an earlier version did not write every key
        there = info.config.get("metadata") or {}
        had["metadata"] = {key: text for key, text in had["metadata"].items() if key in there}
    return info.config, changed_config(info.config, had, gets)


async def _update(
    js: JetStream, name: str, before: Mapping[str, Any], after: dict[str, Any]
) -> StreamInfo:
    if before == after:
        return await js.stream_info(after["name"])
    try:
        return await update_noted(js, before, without_placement(after))
    except ApiError as error:
        if error.err_code == _SUBJECTS_OVERLAP:
            raise await _overlap(js, name, after["subjects"][0], error) from error
        raise


# -- deleting -----------------------------------------------------------------------------


async def delete(js: JetStream, name: str, *, missing_ok: bool = False) -> None:
    """Delete a topic with all its events and subscriptions; partition 0 goes last."""
    try:
        configs = [info.config for info in await find_streams(js, name)]
    except ApiError as error:
        if error.err_code != ErrorCode.STREAM_OFFLINE:
            raise
        # Its nodes are down, perhaps for good; what the others know of it can still be deleted.
        configs = await _known_configs(js, name)
    if not configs and not missing_ok:
        await streams_of(js, name)
    for config in reversed(configs):
        identity = identity_of(config)
        if identity.topic != name:
            raise _part_of(name, identity)
        try:
            await js.delete_stream(config["name"])
        except TopicNotFound:
            continue  # another client is deleting it too


async def _known_configs(js: JetStream, name: str) -> list[dict[str, Any]]:
    """The streams of a topic, in the order of partitions, also those whose nodes are down."""
    found = [config for config in await js.stream_configs() if identity_of(config).topic == name]
    return sorted(found, key=lambda config: identity_of(config).partition)
