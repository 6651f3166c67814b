"""Stored events that cannot be decoded: one rule for all readers. Pure.

Any client can store any bytes. What is undecodable:

1. A message that is marked as a pack and is not a valid one. It counts as one event, with index 0.
2. A damaged message, whose headers have no end or whose subject has no key: the same.
3. A value that is not of its topic's type. The other events of its pack are not affected.

Nothing else is: a time that is not valid counts as none, and the names, ids and header values of
events need not be UTF-8.

The events before an undecodable one are handed out first. Then it is raised, or reported and left
out, as the reader chose. Subscriptions, groups and processes make a dead letter of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from millstream.errors import ConfigError, Undecodable

__all__ = ["DECODE_FAILURES", "OnUndecodable", "Report", "check_policy", "reason_of"]

# What decoding bytes of unknown origin may raise. A broker that does not answer when a schema is
# looked up is not among them: no event is dropped for it.
DECODE_FAILURES: Final = (ValueError, OverflowError, LookupError)

# Called with each event that is left out.
Report = Callable[[Undecodable], object]
OnUndecodable = Literal["fail", "drop"] | Report


def check_policy(given: object) -> None:
    """Refuse anything but `fail`, `drop` and a function."""
    if given not in ("fail", "drop") and not callable(given):
        raise ConfigError(
            f"undecodable {given!r}: choose fail, drop (with a warning in the log), or give a "
            f"function that is called with each undecodable event"
        )


def reason_of(error: Exception) -> str:
    """Why something cannot be decoded, as text that can be printed and stored."""
    text = str(error) or type(error).__name__
    return text.encode("utf-8", "backslashreplace").decode()
