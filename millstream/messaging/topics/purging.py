"""Remove events of a topic by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millstream.errors import ConfigError
from millstream.events.subject import COPIES_TOKEN, check_subject, key_token, partition_of
from millstream.messaging.topics.forgetting import Forgetting
from millstream.messaging.topics.info import topic_info
from millstream.messaging.topics.lookup import streams_of
from millstream.wire.aio.jetstream import JetStream

__all__ = ["Purge", "purge"]


@dataclass(frozen=True, slots=True)
class Purge:
    """Which events to remove; nothing given means all of them."""

    key: str | bytes | None = None  # only plain events with this key, redriven ones too
    subject: str | None = None  # only messages on this pattern of full subjects
    before: int | None = None  # only events before this offset, in one partition
    keep: int | None = None  # all but this number of newest events of each partition
    partition: int | None = None  # only in this partition

    def __post_init__(self) -> None:
        if self.key is not None and self.subject is not None:
            raise ConfigError("purge: give a key or a subject pattern, not both")
        if self.before is not None and self.keep is not None:
            raise ConfigError("purge: give `before` or `keep`, not both")
        if self.before is not None and self.before < 1:
            raise ConfigError(f"purge: offsets start at 1, so before cannot be {self.before}")
        if self.keep is not None and self.keep < 0:
            raise ConfigError(f"purge: keep cannot be {self.keep}")
        if self.subject is not None:
            check_subject(self.subject, wildcards=True)


async def purge(js: JetStream, name: str, what: Purge | None = None) -> int:
    """Remove events; return how many messages (a repeated request counts what was left)."""
    what = what or Purge()
    info = topic_info(name, await streams_of(js, name))
    parts = info.partitions
    if what.partition is not None:
        parts = tuple(part for part in parts if part.number == what.partition)
        if not parts:
            raise ConfigError(f"topic '{name}' has no partition {what.partition}")
    if what.key is not None:
        if info.prefix is None:
            raise ConfigError(f"the stream '{name}' has no keys. Give a subject pattern")
        if info.settings.keys_at_home:
            home = partition_of(what.key, info.settings.partitions)
            parts = tuple(part for part in parts if part.number == home)
    if what.before is not None and len(parts) > 1:
        raise ConfigError(
            f"purge: an offset belongs to a partition, and '{name}' has {len(parts)}. "
            f"Give the partition as well"
        )
    request: dict[str, Any] = {}
    if what.before is not None:
        request["seq"] = what.before
    if what.keep:
        request["keep"] = what.keep
    if what.keep == 0:
        request = {}
    counts = []
    for part in parts:
        async with Forgetting(js, part.stream, part.config):
            for pattern in _purged(what, part.prefix):
                ask = {**request, "filter": pattern} if pattern is not None else request
                counts.append(await js.purge_stream(part.stream, ask))
    return sum(counts)


def _purged(what: Purge, prefix: str | None) -> list[str | None]:
    """The subjects to purge, one request each; None: all of them."""
    if what.key is None:
        return [what.subject]
    token = key_token(what.key)
    return [f"{prefix}.{token}", f"{prefix}.{COPIES_TOKEN}.*.{token}"]
