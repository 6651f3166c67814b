"""`millstream schedule`: events that the broker stores by itself, once or again and again."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.options.bodies import BodyArgument, HeaderOption, body_bytes, header_pairs
from millstream.cli.options.events import later, typed_value
from millstream.cli.options.groups import grouped
from millstream.cli.options.reading import TopicArgument
from millstream.cli.output import JsonOption, print_json, print_table, say
from millstream.cli.session import ServerOption, YesOption, confirm, run
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.messaging import Schedule
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer(
    help="Schedules: events that the broker stores by itself, once or again and again.",
    no_args_is_help=True,
)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the schedule; of a delayed event its id.")
]


@app.command("ls")
def list_(topic: TopicArgument, server: ServerOption = None, json_: JsonOption = False) -> None:
    """List the schedules of a topic, and its events that are published for a later time."""

    async def work(mill: "Mill") -> None:
        found = await (await mill.topic(topic)).schedules.list()
        if json_:
            print_json([_record(schedule) for schedule in found])
        elif not found:
            say(f"Topic '{topic}' has no schedules.")
        else:
            rows = [(s.name, s.rule, s.time_zone or "", _next(s), s.key or "") for s in found]
            print_table("Schedules", ["name", "rule", "time zone", "next", "key"], rows)

    run(work, server)


@app.command()
def info(
    topic: TopicArgument,
    name: NameArgument,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Show a schedule and its event."""

    async def work(mill: "Mill") -> None:
        _show(await _found(mill, topic, name), json_)

    run(work, server)


@dataclass(frozen=True, slots=True)
class _When:
    """When a schedule is due: one of three rules."""

    every: Annotated[
        str | None, typer.Option(metavar="1h", help="Again and again after this time.")
    ] = None
    cron: Annotated[
        str | None,
        typer.Option(
            metavar="'0 3 * * *'",
            help="Minute, hour, day, month and weekday, as in crontab; of six fields the first is "
            "the second.",
        ),
    ] = None
    at: Annotated[str | None, typer.Option(help="Once: a date, or 10m for in ten minutes.")] = None
    time_zone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="Time zone of --cron. (default: UTC)")
    ] = None

    def rule(self) -> dict[str, Any]:
        """The rule, in the forms that `schedules.set` takes."""
        if sum(way is not None for way in (self.every, self.cron, self.at)) != 1:
            raise ConfigError("give one of --every, --cron and --at")
        at = None if self.at is None else later(self.at)
        return {"every": self.every, "cron": self.cron, "at": at, "time_zone": self.time_zone}


@app.command("set")
@grouped
def set_(
    topic: TopicArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the schedule.")],
    when: _When,
    body: BodyArgument = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="Key of the event.")] = None,
    header: HeaderOption = None,
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Store an event by a rule; a schedule of the same name is replaced."""
    rule, headers = when.rule(), dict(header_pairs(header)) or None

    async def work(mill: "Mill") -> None:
        into = await mill.topic(topic)
        value = typed_value(into, body_bytes(body))
        _show(await into.schedules.set(name, value, key, headers=headers, **rule), json_)

    run(work, server)


@app.command()
def rm(
    topic: TopicArgument, name: NameArgument, yes: YesOption = False, server: ServerOption = None
) -> None:
    """Remove a schedule; what it has stored stays."""

    async def work(mill: "Mill") -> None:
        schedule = await _found(mill, topic, name)
        confirm(f"Remove schedule '{name}' ({schedule.rule}) of topic '{topic}'?", yes)
        if not await (await mill.topic(topic)).schedules.cancel(name):
            raise ConfigError(f"schedule '{name}' was due or removed in the meantime")
        say(f"Removed schedule '{name}' of topic '{topic}'.")

    run(work, server)


async def _found(mill: "Mill", topic: str, name: str) -> "Schedule":
    from millstream.nearest import one_of

    schedules = (await mill.topic(topic)).schedules
    found = await schedules.get(name)
    if found is None:
        known = [schedule.name for schedule in await schedules.list()]
        advice = one_of(name, known, "schedule") if known else "it has no schedules"
        raise ConfigError(f"topic '{topic}' has no schedule '{name}': {advice}")
    return found


def _show(schedule: "Schedule", as_json: bool) -> None:
    record = _record(schedule)
    if as_json:
        print_json(record)
        return
    for field, value in record.items():
        if value not in (None, {}):
            say(f"{field:10} {value}")


def _next(schedule: "Schedule") -> str:
    from millstream.cli.options.times import time_text
    from millstream.events.event import nanoseconds_of

    return "" if schedule.next is None else time_text(nanoseconds_of(schedule.next))


def _record(schedule: "Schedule") -> dict[str, Any]:
    from millstream.cli.views.event_text import value_field

    return {
        "name": schedule.name,
        "rule": schedule.rule,
        "time_zone": schedule.time_zone,
        "next": _next(schedule) or None,
        "key": schedule.key,
        **value_field(schedule.value, "auto"),
        "headers": dict(schedule.headers),
        "partition": schedule.partition,
    }
