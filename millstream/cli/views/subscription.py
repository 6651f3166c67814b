"""Subscriptions as tables for people and objects for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from millstream.cli.output import plain, print_table, say
from millstream.cli.views.topic import settings_record, simple, span

if TYPE_CHECKING:
    from millstream.messaging import Lag, Start, SubscriptionInfo

__all__ = ["show", "show_list", "subscription_record"]


def subscription_record(info: SubscriptionInfo, lag: Lag | None) -> dict[str, Any]:
    """A subscription as an object; with its lag, if given, in messages and seconds."""
    settings = {
        field.name: simple(getattr(info.settings, field.name))
        for field in fields(info.settings)
        if field.name != "start"
    }
    record = {
        "topic": info.topic,
        "name": info.name,
        "paused": info.paused,
        "pending": info.pending,
        "in_flight": info.in_flight,
        "waiting_members": info.waiting_members,
        "settings": {"start": _start_text(info.settings.start), **settings},
        "partitions": plain(info.positions),
    }
    return record if lag is None else {**record, "lag": plain(lag)}


def _start_text(start: Start) -> str:
    if start.time is not None:
        return f"@{start.rfc3339}"
    return str(start.offset) if start.offset else start.policy


def show_list(infos: Sequence[SubscriptionInfo]) -> None:
    """Subscriptions as a table."""
    if not infos:
        say("There is no subscription. Create one with 'millstream subscription create TOPIC NAME'")
        return
    print_table(
        "Subscriptions",
        ["topic", "subscription", "#pending", "#in flight", "#redelivered", "#waiting members",
         "state"],
        [
            (
                info.topic,
                info.name,
                f"{info.pending:,}",
                f"{info.in_flight:,}",
                f"{sum(position.redelivered for position in info.positions):,}",
                info.waiting_members,
                "paused" if info.paused else "ok",
            )
            for info in infos
        ],
    )  # fmt: skip


def show(info: SubscriptionInfo, lag: Lag) -> None:
    """One subscription: settings, lag, then partitions."""
    behind = span(timedelta(seconds=lag.seconds))
    state = "paused" if info.paused else f"{info.waiting_members} pulls waiting"
    say(f"Subscription {info.name} of topic {info.topic}, {state}")
    say(f"  lag: {lag.messages:,} messages, {behind}")
    say(f"  start: {_start_text(info.settings.start)}")
    for name, value in settings_record(info.settings).items():
        if name != "start":
            say(f"  {name.replace('_', ' ')}: {value}")
    print_table(
        "",
        ["#partition", "#next offset", "#pending", "#in flight", "#redelivered"],
        [
            (
                position.partition,
                position.next_offset,
                f"{position.pending:,}",
                f"{position.in_flight:,}",
                f"{position.redelivered:,}",
            )
            for position in info.positions
        ],
    )
