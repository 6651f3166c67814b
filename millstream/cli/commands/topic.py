"""`millstream topic`: make, look at, change, empty and remove topics."""

from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.commands import topic_read
from millstream.cli.options import topic as options
from millstream.cli.options.reading import TopicArgument
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, YesOption, confirm, run
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.messaging import TopicInfo
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer(
    help="Topics: durable logs of events. Make, list, change, read and remove them.",
    no_args_is_help=True,
)


@app.command()
def create(
    ctx: typer.Context,
    name: TopicArgument,
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", help="How many partitions. (default: 1)")
    ] = None,
    retention: options.RetentionOption = None,
    replicas: options.ReplicasOption = None,
    storage: options.StorageOption = None,
    compression: options.CompressionOption = None,
    description: options.DescriptionOption = None,
    metadata: options.MetadataOption = None,
    max_age: options.MaxAgeOption = None,
    max_bytes: options.MaxBytesOption = None,
    max_messages: options.MaxMessagesOption = None,
    history: options.HistoryOption = None,
    max_message_size: options.MaxMessageSizeOption = None,
    max_subscriptions: options.MaxSubscriptionsOption = None,
    discard: options.DiscardOption = None,
    discard_new_per_key: options.DiscardNewPerKeyOption = None,
    duplicate_window: options.DuplicateWindowOption = None,
    marker_ttl: options.MarkerTtlOption = None,
    message_ttl: options.MessageTtlOption = None,
    deny_delete: options.DenyDeleteOption = None,
    deny_purge: options.DenyPurgeOption = None,
    early_ack: options.EarlyAckOption = None,
    prefix: options.PrefixOption = None,
    mirror: options.MirrorOption = None,
    sources: options.SourceOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Create a topic; nothing happens when it is there with the same settings.

    With other settings it is an error that says which differ.
    """
    values = options.settings_from(ctx.params)

    async def work(mill: "Mill") -> "TopicInfo":
        topic = await mill.create_topic(name, **values)
        return await topic.info()

    info = run(work, server)
    if json_:
        from millstream.cli.views.topic import topic_record

        print_json(topic_record(info))
    else:
        count = len(info.partitions)
        say(f"Topic '{name}' is ready, {count} partition{'s' * (count != 1)}")


@app.command("ls")
def list_(server: ServerOption = None, json_: JsonOption = False) -> None:
    """List the topics, and every other JetStream stream."""
    from millstream.cli.views import topic as topic_view

    infos = run(lambda mill: mill.topics(), server)
    if json_:
        print_json([topic_view.topic_record(info) for info in infos])
    else:
        topic_view.show_list(infos)


@app.command()
def info(name: TopicArgument, server: ServerOption = None, json_: JsonOption = False) -> None:
    """Show a topic: its settings, and what each partition holds."""
    from millstream.cli.views import topic as topic_view

    async def work(mill: "Mill") -> "TopicInfo":
        return await (await mill.topic(name)).info()

    found = run(work, server)
    if json_:
        print_json(topic_view.topic_record(found))
    else:
        topic_view.show(found)


@app.command()
def edit(
    ctx: typer.Context,
    name: TopicArgument,
    retention: options.RetentionOption = None,
    replicas: options.ReplicasOption = None,
    compression: options.CompressionOption = None,
    description: options.DescriptionOption = None,
    metadata: options.MetadataOption = None,
    max_age: options.MaxAgeOption = None,
    max_bytes: options.MaxBytesOption = None,
    max_messages: options.MaxMessagesOption = None,
    history: options.HistoryOption = None,
    max_message_size: options.MaxMessageSizeOption = None,
    discard: options.DiscardOption = None,
    discard_new_per_key: options.DiscardNewPerKeyOption = None,
    duplicate_window: options.DuplicateWindowOption = None,
    marker_ttl: options.MarkerTtlOption = None,
    message_ttl: options.MessageTtlOption = None,
    deny_delete: options.DenyDeleteOption = None,
    deny_purge: options.DenyPurgeOption = None,
    sources: options.SourceOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Change settings of a topic; what is not named stays.

    What the broker cannot change is an error that says so, and nothing is changed.
    """
    from millstream.cli.views import topic as topic_view

    changes = options.settings_from(ctx.params)
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


@app.command()
def purge(
    name: TopicArgument,
    key: Annotated[
        str | None, typer.Option("--key", "-k", help="Only plain events of this key.")
    ] = None,
    subject: Annotated[
        str | None, typer.Option("--subject", help="Only messages on this subject pattern.")
    ] = None,
    before: Annotated[
        int | None, typer.Option("--before", min=1, help="Only those before this offset.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option("--keep", min=0, help="All but the newest so many.")
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", min=0, help="Only in this partition.")
    ] = None,
    yes: YesOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Remove events of a topic: all, or those that the options name. The topic stays."""
    from millstream.messaging.topics.admin import Purge

    what = Purge(key=key, subject=subject, before=before, keep=keep, partition=partition)
    confirm(f"Remove {'' if what == Purge() else 'those '}events of topic '{name}'?", yes)

    async def work(mill: "Mill") -> int:
        return await (await mill.topic(name)).purge(what)

    removed = run(work, server)
    if json_:
        print_json({"topic": name, "removed": removed})
    else:
        say(f"Removed {removed:,} messages of topic '{name}'")


app.add_typer(topic_read.app)
