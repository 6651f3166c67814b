"""`millstream topic`: create, show, change, purge and remove topics."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.commands import topic_read
from millstream.cli.options.groups import grouped
from millstream.cli.options.reading import TopicArgument
from millstream.cli.options.topic import ChangedSettings, NewSettings
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, YesOption, confirm, run
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.messaging import TopicInfo
    from millstream.mill import Mill
    from millstream.wire.lost import LostRange

__all__ = ["app"]

app = typer.Typer(
    help="Topics: durable logs of events. Create, list, change, read and remove them.",
    no_args_is_help=True,
)


ExactOption = Annotated[
    bool,
    typer.Option("--exact", help="Count the events in all packs, however long that takes."),
]


@app.command()
@grouped
def create(
    name: TopicArgument,
    settings: NewSettings,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Create a topic; a no-op if it already exists with the same settings.

    If it exists with other settings, the error names the differences.
    """

    async def work(mill: "Mill") -> "TopicInfo":
        topic = await mill.create_topic(name, **settings)
        return await topic.info()

    info = run(work, server)
    if json_:
        from millstream.cli.views.topic import topic_record

        print_json(topic_record(info))
    else:
        count = len(info.partitions)
        say(f"Topic '{name}' is ready, {count} partition{'s' * (count != 1)}")


@app.command("ls")
def list_(
    exact: ExactOption = False, server: ServerOption = None, json_: JsonOption = False
) -> None:
    """List the topics, and every other JetStream stream, with their events and messages.

    A pack of many events is one message. '~' marks an estimate, in JSON "events_exact": false;
    '-' are streams that Millstream did not create.
    """
    from millstream.cli.views import topic as topic_view

    async def work(mill: "Mill") -> "tuple[list[TopicInfo], topic_view.Counts]":
        infos = await mill.topics()
        return infos, await topic_view.counted(mill, infos, exact=exact)

    infos, counts = run(work, server)
    if json_:
        print_json([topic_view.topic_record(info, counts[info.name]) for info in infos])
    else:
        topic_view.show_list(infos, counts)


@app.command()
def info(
    name: TopicArgument,
    exact: ExactOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Show a topic: its settings, and what each partition holds."""
    from millstream.cli.views import topic as topic_view

    async def work(mill: "Mill") -> "tuple[TopicInfo, topic_view.Counts]":
        found = await (await mill.topic(name)).info()
        return found, await topic_view.counted(mill, [found], exact=exact)

    found, counts = run(work, server)
    if json_:
        print_json(topic_view.topic_record(found, counts[found.name]))
    else:
        topic_view.show(found, counts[found.name])


@app.command()
@grouped
def edit(
    name: TopicArgument,
    changes: ChangedSettings,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Change settings of a topic; settings that are not given stay as they are.

    If the broker cannot make one of the changes, the error says which, and nothing is changed.
    """
    from millstream.cli.views import topic as topic_view

    if not changes:
        raise ConfigError(f"nothing to change in '{name}': give at least one setting")
    found = run(lambda mill: mill.edit_topic(name, **changes), server)
    if json_:
        print_json(topic_view.topic_record(found))
    else:
        say(f"Changed {', '.join(sorted(changes))} of topic '{name}'")


@app.command("rm")
def remove(name: TopicArgument, yes: YesOption = False, server: ServerOption = None) -> None:
    """Remove a topic with all its events and subscriptions."""

    async def count(mill: "Mill") -> int:
        return (await (await mill.topic(name)).info()).messages

    if not yes:
        messages = run(count, server)
        confirm(f"Remove topic '{name}' with its {messages:,} messages?", yes)
    run(lambda mill: mill.delete_topic(name), server)
    say(f"Removed topic '{name}'")


@dataclass(frozen=True, slots=True)
class _Selection:
    """The events to remove."""

    key: Annotated[
        str | None, typer.Option("--key", "-k", help="Only plain events with this key.")
    ] = None
    subject: Annotated[
        str | None, typer.Option("--subject", help="Only messages on this subject pattern.")
    ] = None
    before: Annotated[
        int | None, typer.Option("--before", min=1, help="Only events before this offset.")
    ] = None
    keep: Annotated[
        int | None, typer.Option("--keep", min=0, help="All but the newest N of each partition.")
    ] = None
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", min=0, help="Only in this partition.")
    ] = None


@app.command()
@grouped
def purge(
    name: TopicArgument,
    selection: _Selection,
    yes: YesOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Remove events of a topic: all of them, or those that the options select."""
    from millstream.messaging.topics.admin import Purge

    what = Purge(**asdict(selection))
    which = "all" if what == Purge() else "the selected"
    confirm(f"Remove {which} events of topic '{name}'?", yes)

    async def work(mill: "Mill") -> int:
        return await (await mill.topic(name)).admin.purge(what)

    removed = run(work, server)
    if json_:
        print_json({"topic": name, "removed": removed})
    else:
        say(f"Removed {removed:,} messages of topic '{name}'")


@app.command()
def balance(name: TopicArgument, server: ServerOption = None, json_: JsonOption = False) -> None:
    """Spread the leaders of a topic's partitions over the nodes of a cluster.

    Useful when a node is back: the others have taken over what it led. 'topic info' shows them.
    """

    async def work(mill: "Mill") -> int:
        return await (await mill.topic(name)).admin.balance()

    moved = run(work, server)
    if json_:
        print_json({"topic": name, "moved": moved})
    else:
        say(f"Moved {moved} leaders of topic '{name}'")


@app.command("accept-loss")
def accept_loss(
    name: TopicArgument,
    by: Annotated[str, typer.Option("--by", help="Who accepts it.", show_default="this user")] = "",
    yes: YesOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Let readers continue after events that the broker has lost.

    Until then they stop there. What was lost, and who accepted it when, stays in 'topic info'.
    """
    from millstream.cli.views import topic as topic_view

    async def work(mill: "Mill") -> "list[tuple[int, LostRange]]":
        return await (await mill.topic(name)).admin.accept_loss(by)

    confirm(f"Let the readers of topic '{name}' continue without the events that are lost?", yes)
    taken = run(work, server)
    if json_:
        losses = [{"partition": number, **asdict(lost)} for number, lost in taken]
        print_json({"topic": name, "accepted": losses})
        return
    for number, lost in taken:
        say(f"Topic '{name}', partition {number}, {topic_view.lost_text(lost)}")
    if not taken:
        say(f"Topic '{name}' has no loss that is not accepted")


app.add_typer(topic_read.app)
