"""What a table has forgotten: whether a key without a stored value at an earlier time had one.

A table keeps the newest values of each key, so a value of the past may be gone. The server says how
many values of a key are stored; that a key was overwritten can be seen from it. Other removals
leave no trace there, so this module decides by what is known of them:

- settings that remove the oldest values of all keys (an age, a size) remove them at any time;
- a purge, or a change of such a setting, is noted in the stream's metadata with the time at which
  it ended: what the table was before that time is in doubt, and later it is not.

Pure; forgetting.py writes the note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from millstream.errors import ConfigError, HistoryGone
from millstream.events.event import datetime_of, nanoseconds_of
from millstream.events.fence import EXPECTED_HEADER
from millstream.events.start import Start
from millstream.messaging.topics.setting_forms import duration_text
from millstream.wire.api import StreamInfo
from millstream.wire.message import StoredMessage, stored_ns_of
from millstream.wire.protocol import parse_headers

__all__ = [
    "LOOKED_AT",
    "begun",
    "check_created",
    "doubt",
    "first_after",
    "history_of",
    "keeps_history",
    "loses_values",
    "nothing_removed",
    "overwritten",
    "past_time",
    "was_first",
]

FORGOTTEN_METADATA: Final = "millstream.forgotten"
# A time that is later than the broker's clock by no more than this means now: clocks differ.
CLOCKS_DIFFER: Final = timedelta(seconds=10)
# Of so many keys at a time the oldest value is looked at, until the past of one is unknown.
LOOKED_AT: Final = 1000
_EXPECTED_OF: Final = f"{EXPECTED_HEADER}-Subject"
# Removing has begun and has not ended: any time in the past is in doubt.
_NOT_ENDED: Final = "now"
# A change of one of these removes values, or ends the reason why others were removed before.
_REMOVING: Final = (
    *("max_msgs_per_subject", "max_age", "max_bytes", "max_msgs", "discard", "retention"),
    *("discard_new_per_subject", "allow_rollup_hdrs", "mirror", "sources"),
)


# -- the note -----------------------------------------------------------------------------


def loses_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a change of a stream's configuration may remove values of a table."""
    if not keeps_history(before) and not keeps_history(after):
        return False
    return any((before.get(key) or 0) != (after.get(key) or 0) for key in _REMOVING)


def begun(config: Mapping[str, Any], at: str = _NOT_ENDED) -> dict[str, Any]:
    """The configuration with the note that values are removed from now on."""
    return {**config, "metadata": {**(config.get("metadata") or {}), FORGOTTEN_METADATA: at}}


def keeps_history(config: Mapping[str, Any]) -> bool:
    """Whether a stream is a table."""
    return int(config.get("max_msgs_per_subject") or 0) > 0


def _in_doubt_until(config: Mapping[str, Any]) -> int | None:
    """When values were last removed by hand, in nanoseconds; None: they may be removed now."""
    noted = (config.get("metadata") or {}).get(FORGOTTEN_METADATA)
    if noted is None:
        return 0
    try:
        return stored_ns_of(noted)
    except ValueError:
        return None


# -- the decision -------------------------------------------------------------------------


def nothing_removed(info: StreamInfo) -> bool:
    """Whether every message that was ever stored is still there."""
    return info.state.messages == info.state.last_seq


def history_of(info: StreamInfo) -> int | None:
    """Values kept of each key, the oldest being overwritten; None: none is overwritten."""
    config = info.config
    if config.get("discard_new_per_subject") or not keeps_history(config):
        return None
    return int(config["max_msgs_per_subject"])


def doubt(info: StreamInfo, time: datetime) -> str | None:
    """Why a key of which no value is stored that it had at a time may have had one.

    None: it had none, unless it was overwritten. `info` must be newer than the look at the key.
    """
    if nothing_removed(info):
        return None
    config = info.config
    if config.get("mirror") or config.get("sources"):
        return "this table is a copy, and its origin had removed values before they were copied"
    until = _in_doubt_until(config)
    if until is None or nanoseconds_of(time) <= until:
        return "values were purged, or the table's limits were changed, after that time"
    if config.get("retention", "limits") != "limits":
        return f"the retention '{config['retention']}' removes values that are acked"
    if config.get("allow_rollup_hdrs"):
        return "the table allows roll-ups, which remove values (setting rollup)"
    if info.state.first_seq <= 1:
        return None  # what follows removes the first value before all others
    if (age := _aged_out(info)) is not None:
        return f"values are removed after {duration_text(age)} (setting max_age)"
    for key, name in (("max_bytes", "max_bytes"), ("max_msgs", "max_messages")):
        if int(config.get(key) or 0) > 0 and config.get("discard", "old") == "old":
            return f"the oldest values are removed at a limit (setting {name})"
    return None


def _aged_out(info: StreamInfo) -> timedelta | None:
    """The maximum age of values if the table is old enough that some may have passed it."""
    age = int(info.config.get("max_age") or 0)
    if age and stored_ns_of(info.created) + age < stored_ns_of(info.ts):
        return timedelta(microseconds=age / 1000)
    return None


def was_first(oldest: StoredMessage | None) -> bool:
    """Whether a value was stored under the condition that its key had none."""
    if oldest is None:
        return False
    headers = parse_headers(oldest.headers)
    return headers.get(EXPECTED_HEADER) == "0" and _EXPECTED_OF not in headers


def overwritten(
    table: str,
    key: str,
    time: datetime,
    history: int,
    oldest: StoredMessage | None,
    others: int = 0,
) -> HistoryGone:
    """The error for a key that has as many values as are kept, all of them later than a time."""
    stored = None if oldest is None else datetime_of(stored_ns_of(oldest.time))
    since = "" if stored is None else f", the oldest stored at {stored.isoformat()}"
    return HistoryGone(
        table,
        key,
        time,
        f"the table keeps {history} value(s) of a key (setting history){since}",
        oldest=stored,
        others=others,
        advice="To look back further, create the table with a larger history",
    )


# -- the time -----------------------------------------------------------------------------


def past_time(table: str, time: datetime, infos: Sequence[StreamInfo]) -> datetime:
    """The time in UTC, at most that of the broker's clock; ConfigError if it is in the future."""
    nanoseconds_of(time)  # refuses one without a zone
    now = min(datetime_of(stored_ns_of(info.ts)) for info in infos)
    if time > now + CLOCKS_DIFFER:
        raise ConfigError(
            f"table '{table}': {time.isoformat()} is in the future: the broker's clock is at "
            f"{now.isoformat()}. Give an earlier time"
        )
    return min(time.astimezone(UTC), now)


def first_after(time: datetime) -> str:
    """The time, as the server reads it, from which on values are later than this microsecond."""
    return Start.at_time(time + timedelta(microseconds=1)).rfc3339 or ""


def check_created(
    table: str, time: datetime, infos: Sequence[StreamInfo], ends: Sequence[int]
) -> None:
    """HistoryGone if a table was created after a time; `ends`: the offsets after that time.

    A copy has values that are older than itself.
    """
    created = min(datetime_of(stored_ns_of(info.created)) for info in infos)
    older = (end > max(1, info.state.first_seq) for info, end in zip(infos, ends, strict=True))
    if time < created and not any(older):
        raise HistoryGone(
            table,
            None,
            time,
            f"it was created at {created.isoformat()}",
            advice="Give a later time; a table of this name that was deleted before is not known",
        )
