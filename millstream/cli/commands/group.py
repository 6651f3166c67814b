"""`millstream group`: the ordered groups of topics."""

from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.options.groups import grouped
from millstream.cli.options.reading import TopicArgument
from millstream.cli.options.seek import SeekOptions
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, YesOption, confirm, run
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.messaging import GroupInfo
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer(
    help="Groups: members that share the partitions of a topic and handle each key in order.",
    no_args_is_help=True,
)

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.")]


@app.command("ls")
def list_(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="Only groups of this topic.")
    ] = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """List groups: members, lag and parked keys."""
    from millstream.cli.views import group as view

    async def work(mill: "Mill") -> "list[GroupInfo]":
        return await (mill.groups() if topic is None else (await mill.topic(topic)).groups.list())

    found = run(work, server)
    if json_:
        print_json([view.group_record(info) for info in found])
    else:
        view.show_list(found)


@app.command()
def info(
    topic: TopicArgument,
    group: GroupArgument,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Show a group: members, and for each partition owner, position, lag and parked keys."""
    from millstream.cli.views import group as view

    async def work(mill: "Mill") -> "GroupInfo":
        return await (await mill.topic(topic)).groups.info(group)

    found = run(work, server)
    if json_:
        print_json(view.group_record(found))
    else:
        view.show(found)


@app.command()
def unpark(
    topic: TopicArgument,
    group: GroupArgument,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="The keys to unpark.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Unpark all parked keys.")] = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Hand out the next events of parked keys again; members may be running.

    Events that became dead letters stay there: 'dlq redrive' them first when order matters. A key
    that is not parked is an error, after the others are unparked.
    """
    if all_ == bool(keys):
        raise ConfigError("give the keys to unpark, or --all")

    async def work(mill: "Mill") -> "dict[str, bool]":
        groups = (await mill.topic(topic)).groups
        wanted = [parked.key for parked in await groups.parked(group)] if all_ else keys or []
        return {key: await groups.unpark(group, key) for key in wanted}

    done = run(work, server)
    unparked = sum(done.values())
    if json_:
        print_json({"topic": topic, "group": group, "unparked": unparked})
    else:
        say(f"Unparked {unparked:,} key{'s' * (unparked != 1)} of group '{group}'")
    missing = [key for key, found in done.items() if not found]
    if missing and not all_:
        named = ", ".join(f"'{key}'" for key in missing)
        raise ConfigError(
            f"not parked in group '{group}' of '{topic}': {named}. "
            f"'millstream group info {topic} {group}' shows the parked keys"
        )


@app.command()
@grouped
def seek(
    topic: TopicArgument,
    group: GroupArgument,
    target: SeekOptions,
    yes: YesOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Move a group: events after the new position are handled (again), in every partition.

    Refused while members are running; of one that died, its lease must end first, which this
    waits for. Parked keys stay parked. Moving forward skips events, so it asks first.
    """
    from millstream.cli.views import group as view

    position = target.position()
    if not target.start:
        confirm(f"Move group '{group}' of topic '{topic}'? It may skip events.", yes)

    async def work(mill: "Mill") -> "GroupInfo":
        groups = (await mill.topic(topic)).groups
        await groups.info(group)  # a misspelt name must not create a group
        await groups.seek(group, position)
        return await groups.info(group)

    found = run(work, server)
    if json_:
        print_json(view.group_record(found))
    else:
        say(f"Moved group '{group}': {found.lag.messages:,} messages pending")


@app.command("rm")
def remove(
    topic: TopicArgument, group: GroupArgument, yes: YesOption = False, server: ServerOption = None
) -> None:
    """Remove a group, its position and its parked keys; the events of the topic stay.

    Refused while members are running.
    """
    confirm(f"Remove group '{group}' of topic '{topic}'?", yes)

    async def work(mill: "Mill") -> None:
        await (await mill.topic(topic)).groups.delete(group)

    run(work, server)
    say(f"Removed group '{group}' of topic '{topic}'")
