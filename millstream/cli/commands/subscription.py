"""`millstream subscription`: the durable readers of topics."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.options.reading import (
    PLACE_HELP,
    FormatOption,
    RawOption,
    TopicArgument,
    ValueOption,
)
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, YesOption, confirm, run
from millstream.errors import ConfigError
from millstream.settings import parse_duration

if TYPE_CHECKING:
    from millstream.cli.views.event_text import Formatter
    from millstream.messaging import Lag, Start, SubscriptionInfo
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer(
    help="Subscriptions: named durable readers of a topic, shared by their members.",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription.")]
AckWaitOption = Annotated[
    str | None, typer.Option(help="Lease: unsettled by then, it is delivered again. (default: 30s)")
]
MaxDeliverOption = Annotated[
    str | None, typer.Option(help="Deliveries of one event until it is a dead letter, or none.")
]
BackoffOption = Annotated[
    str | None,
    typer.Option(metavar="1s,10s,1m", help="Delays before the next deliveries after a nack."),
]
MaxInFlightOption = Annotated[
    int | None, typer.Option(min=1, help="Delivered and unsettled messages at most.")
]
RateLimitOption = Annotated[
    str | None, typer.Option(help="Events a second that a member is given at most, or none.")
]
DeadLetterOption = Annotated[
    str | None,
    typer.Option(metavar="TOPIC", help="Topic for dead letters. (default: TOPIC-NAME-dead)"),
]
DescriptionOption = Annotated[str | None, typer.Option(help="What it is for.")]


@app.command()
def create(
    ctx: typer.Context,
    topic: TopicArgument,
    name: NameArgument,
    start: Annotated[
        str,
        typer.Option(
            "--start", metavar="PLACE", help=f"Where it begins: {PLACE_HELP}. Not -N, but last."
        ),
    ] = "beginning",
    key: Annotated[
        list[str] | None, typer.Option("--key", "-k", help="Only this key; repeat it for more.")
    ] = None,
    subject: Annotated[
        list[str] | None,
        typer.Option("--subject", help="Only this subject pattern; repeat it for more."),
    ] = None,
    ack: Annotated[
        str,
        typer.Option(help="explicit, all (an ack covers all before it) or none (once at most)."),
    ] = "explicit",
    ack_wait: AckWaitOption = None,
    max_deliver: MaxDeliverOption = None,
    backoff: BackoffOption = None,
    max_in_flight: MaxInFlightOption = None,
    rate_limit: RateLimitOption = None,
    dead_letter: DeadLetterOption = None,
    inactive_after: Annotated[
        str | None, typer.Option(help="Forget it when it was unused for so long.")
    ] = None,
    description: DescriptionOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Create a subscription; nothing happens when it is there with the same settings."""
    from millstream.messaging import SubscriptionSettings

    values = _settings(ctx.params)
    if inactive_after is not None:
        values["inactive_after"] = parse_duration(inactive_after)
    settings = SubscriptionSettings(
        start=_start(start), keys=tuple(key or ()), subjects=tuple(subject or ()),
        ack=ack, **values,  # type: ignore[arg-type]
    )  # fmt: skip

    async def work(mill: "Mill") -> "SubscriptionInfo":
        found = await mill.topic(topic)
        async with found.subscribe(name, settings):
            return await found.subscriptions.info(name)

    info = run(work, server)
    if json_:
        _print_json(info, None)
    else:
        say(f"Subscription '{name}' of topic '{topic}' is ready, {info.pending:,} messages to come")


@app.command("ls")
def list_(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="Only those of this topic.")
    ] = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """List subscriptions with what they have left to do."""
    from millstream.cli.views import subscription as view

    async def work(mill: "Mill") -> "list[SubscriptionInfo]":
        names = [topic] if topic else [info.name for info in await mill.topics()]
        infos: list[SubscriptionInfo] = []
        for name in names:
            infos += await (await mill.topic(name)).subscriptions.list()
        return infos

    infos = run(work, server)
    if json_:
        print_json([view.subscription_record(info, None) for info in infos])
    else:
        view.show_list(infos)


@app.command()
def info(
    topic: TopicArgument, name: NameArgument, server: ServerOption = None, json_: JsonOption = False
) -> None:
    """Show a subscription: settings, where it stands, its lag in messages and seconds."""
    from millstream.cli.views import subscription as view

    async def work(mill: "Mill") -> "tuple[SubscriptionInfo, Lag]":
        found = await mill.topic(topic)
        return await found.subscriptions.info(name), await found.subscriptions.lag(name)

    found, lag = run(work, server)
    if json_:
        _print_json(found, lag)
    else:
        view.show(found, lag)


@app.command()
def edit(
    ctx: typer.Context,
    topic: TopicArgument,
    name: NameArgument,
    ack_wait: AckWaitOption = None,
    max_deliver: MaxDeliverOption = None,
    backoff: BackoffOption = None,
    max_in_flight: MaxInFlightOption = None,
    rate_limit: RateLimitOption = None,
    dead_letter: DeadLetterOption = None,
    description: DescriptionOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Change settings of a subscription; where it stands is kept.

    Members that run now keep the settings they began with.
    """
    changes = _settings(ctx.params)
    if not changes:
        raise ConfigError(f"nothing to change in '{name}': give at least one setting")

    async def work(mill: "Mill") -> "SubscriptionInfo":
        found = await mill.topic(topic)
        await found.subscriptions.edit(name, **changes)
        return await found.subscriptions.info(name)

    found = run(work, server)
    if json_:
        _print_json(found, None)
    else:
        say(f"Changed {', '.join(sorted(changes))} of subscription '{name}'")


@app.command()
def pull(
    topic: TopicArgument,
    name: NameArgument,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Events to take at most.")] = 1,
    ack: Annotated[
        bool, typer.Option("--ack", help="Ack them: they are done when they are printed.")
    ] = False,
    wait: Annotated[
        str, typer.Option("--wait", help="How long to wait for the first event.")
    ] = "5s",
    form: FormatOption = None,
    raw: RawOption = False,
    value: ValueOption = "auto",
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Take events from a subscription and print them; with --json one object a line.

    Without --ack they come again when their lease is over, and it counts as a delivery. To only
    look, without touching the subscription, use 'topic tail'.
    """
    from millstream.cli.views.event_text import formatter

    write = formatter(form, raw=raw, as_json=json_, value=value)
    seconds = parse_duration(wait)
    run(lambda mill: _pull(mill, topic, name, (limit, ack, seconds), write), server)


async def _pull(
    mill: "Mill", topic: str, name: str, how: tuple[int, bool, float], write: "Formatter"
) -> None:
    from millstream.cli.views.lines import Lines

    limit, ack, seconds = how
    found = await mill.topic(topic)
    await found.subscriptions.info(name)  # a misspelt name must not make a subscription
    async with found.subscribe(name) as member, Lines() as out:
        member.inbox.fetch_at_most = limit
        left = limit
        while left:
            deliveries = await member.pull(left, seconds)
            for delivery in deliveries:
                await out.write(write(delivery))
            await out.flush()
            if ack:  # only what the reader has
                for delivery in deliveries:
                    await delivery.ack_sync()
            left -= len(deliveries)
            if not deliveries:
                break
            seconds = min(seconds, 0.5)  # the rest is there already or it is not


@app.command()
def seek(
    topic: TopicArgument,
    name: NameArgument,
    offset: Annotated[int | None, typer.Option("--offset", min=1, help="To this offset.")] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", help="To this time: a date, or 10m for ten minutes ago."),
    ] = None,
    start: Annotated[bool, typer.Option("--start", help="To the first event.")] = False,
    end: Annotated[bool, typer.Option("--end", help="Behind the last event.")] = False,
    yes: YesOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Move a subscription: what lies behind the new place is delivered (again).

    Moving forward skips events, so it asks first.
    """
    from millstream.cli.options.positions import moment
    from millstream.messaging import Start

    if (offset is not None) + (time is not None) + start + end != 1:
        raise ConfigError("say where to: one of --offset, --time, --start, --end")
    if offset is not None:
        place = Start.at_offset(offset)
    elif time is not None:
        place = Start.at_time(moment(time))
    else:
        place = Start.ALL if start else Start.NEW
    if not start:
        confirm(f"Move subscription '{name}' of topic '{topic}'? It may skip events.", yes)

    async def work(mill: "Mill") -> "SubscriptionInfo":
        found = await mill.topic(topic)
        await found.subscriptions.seek(name, place)
        return await found.subscriptions.info(name)

    info = run(work, server)
    if json_:
        _print_json(info, None)
    else:
        say(f"Moved subscription '{name}': {info.pending:,} messages to come")


@app.command()
def pause(
    topic: TopicArgument,
    name: NameArgument,
    time: Annotated[
        str | None, typer.Option("--for", help="For so long. (default: until 'resume')")
    ] = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Deliver nothing to a subscription until it is resumed, or for a time."""
    seconds = None if time is None else parse_duration(time)

    async def work(mill: "Mill") -> str:
        from millstream.cli.views.topic import simple

        return str(simple(await (await mill.topic(topic)).subscriptions.pause(name, seconds)))

    until = run(work, server)
    if json_:
        print_json({"topic": topic, "name": name, "paused_until": None if time is None else until})
    else:
        say(f"Paused '{name}' until {'it is resumed' if time is None else until}")


@app.command()
def resume(topic: TopicArgument, name: NameArgument, server: ServerOption = None) -> None:
    """Deliver to a paused subscription again."""

    async def work(mill: "Mill") -> None:
        await (await mill.topic(topic)).subscriptions.resume(name)

    run(work, server)
    say(f"Resumed '{name}'")


@app.command("rm")
def remove(
    topic: TopicArgument, name: NameArgument, yes: YesOption = False, server: ServerOption = None
) -> None:
    """Remove a subscription; where it stood is forgotten, the topic's events stay."""
    confirm(f"Remove subscription '{name}' of topic '{topic}'?", yes)

    async def work(mill: "Mill") -> None:
        await (await mill.topic(topic)).subscriptions.delete(name)

    run(work, server)
    say(f"Removed subscription '{name}' of topic '{topic}'")


def _print_json(info: "SubscriptionInfo", lag: "Lag | None") -> None:
    from millstream.cli.views.subscription import subscription_record

    print_json(subscription_record(info, lag))


def _start(text: str) -> "Start":
    from millstream.cli.options.positions import place
    from millstream.messaging import Start

    if text == "last":
        return Start.LAST
    found = place(text)
    if found.last is not None:
        raise ConfigError("--start: a subscription begins at one place; -N differs by partition")
    return Start.NEW if found.word == "end" else found.start(0)


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of a subscription's settings, in the forms SubscriptionSettings takes."""
    values: dict[str, Any] = {
        name: options[name]
        for name in ("max_in_flight", "dead_letter", "description")
        if options.get(name) is not None
    }
    if options.get("ack_wait") is not None:
        values["ack_wait"] = parse_duration(options["ack_wait"])
    if options.get("backoff") is not None:
        delays = (part for part in options["backoff"].split(",") if part.strip())
        values["backoff"] = tuple(parse_duration(part) for part in delays)
    for name, kind in (("max_deliver", int), ("rate_limit", float)):
        text = options.get(name)
        if text is None:
            continue
        try:
            values[name] = None if text == "none" else kind(text)
        except ValueError:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: {text!r} is not a number. Give one, or 'none'") from None
    return values
