"""Services as tables for people and objects for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from millstream.cli.output import print_table, say

if TYPE_CHECKING:
    from millstream.messaging import ServiceInfo, ServiceStats

__all__ = ["record", "show_list", "show_stats"]

NOTHING = "No service answered"


def record(found: ServiceInfo | ServiceStats) -> Any:
    """An instance as an object, with the names that the standard gives its fields."""
    return msgspec.to_builtins(found)


def show_list(found: Sequence[ServiceInfo]) -> None:
    """A line for each instance."""
    if not found:
        say(NOTHING)
        return
    print_table(
        "Services",
        ["service", "version", "instance", "subjects", "description"],
        [
            (
                info.name,
                info.version,
                info.id,
                ", ".join(endpoint.subject for endpoint in info.endpoints or ()),
                info.description,
            )
            for info in found
        ],
    )


def show_stats(found: Sequence[ServiceStats]) -> None:
    """A line for each endpoint of each instance."""
    if not found:
        say(NOTHING)
        return
    print_table(
        "Services",
        ["service", "instance", "endpoint", "subject", "#requests", "#errors", "#average ms",
         "last error"],
        [
            (
                one.name,
                one.id,
                endpoint.name,
                endpoint.subject,
                f"{endpoint.num_requests:,}",
                f"{endpoint.num_errors:,}",
                f"{endpoint.average_processing_time / 1e6:,.2f}",
                endpoint.last_error,
            )
            for one in found
            for endpoint in one.endpoints or ()
        ],
    )  # fmt: skip
