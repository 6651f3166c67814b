"""`millstream subscription`: the durable readers of topics."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.options.groups import grouped
from millstream.cli.options.positions import POSITION_HELP, parse_position
from millstream.cli.options.reading import EventFormat, TopicArgument
from millstream.cli.options.seek import SeekOptions
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, YesOption, confirm, run
from millstream.cli.views.left_out import LeftOut
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


@dataclass(frozen=True, slots=True)
class _Beginning:
    """Settings that are fixed when a subscription is created."""

    start: Annotated[
        str,
        typer.Option(
            "--start",
            metavar="POSITION",
            help=f"Where it starts: {POSITION_HELP}; or last, not -N.",
        ),
    ] = "beginning"
    key: Annotated[
        list[str] | None,
        typer.Option("--key", "-k", help="Only events with this key; repeat it for more."),
    ] = None
    subject: Annotated[
        list[str] | None,
        typer.Option("--subject", help="Only this subject pattern; repeat it for more."),
    ] = None
    ack: Annotated[
        str,
        typer.Option(
            help="explicit, all (an ack also covers all earlier events) or none (at most once)."
        ),
    ] = "explicit"
    inactive_after: Annotated[
        str | None, typer.Option(help="Delete the subscription after this time without members.")
    ] = None

    def settings(self) -> dict[str, Any]:
        """The settings, in the forms that SubscriptionSettings takes."""
        values: dict[str, Any] = {"start": _start(self.start), "ack": self.ack}
        values |= {"keys": tuple(self.key or ()), "subjects": tuple(self.subject or ())}
        if self.inactive_after is not None:
            values["inactive_after"] = parse_duration(self.inactive_after)
        return values


@dataclass(frozen=True, slots=True)
class _Changeable:
    """Settings that can be changed later."""

    ack_wait: Annotated[
        str | None,
        typer.Option(
            help="Lease: events that are not acked in time are redelivered. (default: 30s)"
        ),
    ] = None
    max_deliver: Annotated[
        str | None, typer.Option(help="Deliveries before an event is dead-lettered, or none.")
    ] = None
    backoff: Annotated[
        str | None,
        typer.Option(metavar="1s,10s,1m", help="Delays before redelivery after a nack."),
    ] = None
    max_in_flight: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of messages that are delivered and not acked."),
    ] = None
    member_rate_limit: Annotated[
        str | None, typer.Option(help="Events per second that each member takes at most, or none.")
    ] = None
    dead_letter: Annotated[
        str | None,
        typer.Option(metavar="TOPIC", help="Topic for dead letters. (default: TOPIC-NAME-dead)"),
    ] = None
    description: Annotated[str | None, typer.Option(help="What the subscription is for.")] = None

    def settings(self) -> dict[str, Any]:
        """The settings that were given, in the forms that SubscriptionSettings takes."""
        as_given = ("max_in_flight", "dead_letter", "description")
        values = {name: getattr(self, name) for name in as_given}
        values["ack_wait"] = None if self.ack_wait is None else parse_duration(self.ack_wait)
        values = {name: value for name, value in values.items() if value is not None}
        if self.backoff is not None:
            delays = (part for part in self.backoff.split(",") if part.strip())
            values["backoff"] = tuple(parse_duration(part) for part in delays)
        if self.max_deliver is not None:
            values["max_deliver"] = _number_or_none("--max-deliver", self.max_deliver, int)
        if self.member_rate_limit is not None:
            values["member_rate_limit"] = _number_or_none(
                "--member-rate-limit", self.member_rate_limit, float
            )
        return values


@app.command()
@grouped
def create(
    topic: TopicArgument,
    name: NameArgument,
    beginning: _Beginning,
    more: _Changeable,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Create a subscription; a no-op if it already exists with the same settings."""
    from millstream.messaging import SubscriptionSettings

    settings = SubscriptionSettings(**beginning.settings(), **more.settings())

    async def work(mill: "Mill") -> "SubscriptionInfo":
        found = await mill.topic(topic)
        async with found.subscribe(name, settings):
            return await found.subscriptions.info(name)

    info = run(work, server)
    if json_:
        _print_json(info, None)
    else:
        say(f"Subscription '{name}' of topic '{topic}' is ready, {info.pending:,} messages pending")


@app.command("ls")
def list_(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="Only subscriptions of this topic.")
    ] = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """List subscriptions and how many messages each has left."""
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
    """Show a subscription: settings, position, and lag in messages and seconds."""
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
@grouped
def edit(
    topic: TopicArgument,
    name: NameArgument,
    given: _Changeable,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Change settings of a subscription; its position is kept.

    Members that are running keep the settings they started with.
    """
    changes = given.settings()
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


@dataclass(frozen=True, slots=True)
class _Pull:
    """How many events `pull` takes, and what becomes of them."""

    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Maximum number of events to take.")
    ] = 1
    ack: Annotated[bool, typer.Option("--ack", help="Ack the events once they are printed.")] = (
        False
    )
    wait: Annotated[str, typer.Option("--wait", help="How long to wait for the first event.")] = (
        "5s"
    )


@app.command()
@grouped
def pull(
    topic: TopicArgument,
    name: NameArgument,
    how: _Pull,
    form: EventFormat,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Take events from a subscription and print them; with --json one object per line.

    Without --ack they are redelivered when their lease ends, and that counts as a delivery. One
    that cannot be decoded is named on stderr and not acked, and the exit code is 1. To read events
    without affecting the subscription, use 'topic tail'.
    """
    from millstream.cli.views.event_text import formatter_of

    write = formatter_of(form, json_)
    left_out = LeftOut("fail")
    seconds = parse_duration(how.wait)
    output = (write, left_out)
    run(lambda mill: _pull(mill, (topic, name), how, seconds, output), server)
    left_out.finish()


async def _pull(
    mill: "Mill",
    source: tuple[str, str],
    how: _Pull,
    seconds: float,
    output: "tuple[Formatter, LeftOut]",
) -> None:
    from millstream.cli.views.stdout_writer import StdoutWriter
    from millstream.events.undecodable import DECODE_FAILURES

    write, left_out = output

    topic, name = source
    found = await mill.topic(topic)
    await found.subscriptions.info(name)  # a misspelt name must not create a subscription
    async with found.subscribe(name) as member, StdoutWriter() as out:
        member.inbox.fetch_at_most = how.limit
        left = how.limit
        while left:
            deliveries = await member.pull(left, seconds)
            printed = []
            for delivery in deliveries:
                try:
                    line = write(delivery)
                except DECODE_FAILURES as error:
                    left_out.unwritable(delivery, error)
                    continue
                await out.write(line)
                printed.append(delivery)
            await out.flush()
            if how.ack:  # only what the reader has received
                for delivery in printed:
                    await delivery.ack_sync()
            left -= len(deliveries)
            if not deliveries:
                break
            seconds = min(seconds, 0.5)  # the rest is either available by now or not stored


@app.command()
@grouped
def seek(
    topic: TopicArgument,
    name: NameArgument,
    target: SeekOptions,
    yes: YesOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Move a subscription: events after the new position are delivered (again).

    Moving forward skips events, so it asks first.
    """
    position = target.position()
    if not target.start:
        confirm(f"Move subscription '{name}' of topic '{topic}'? It may skip events.", yes)

    async def work(mill: "Mill") -> "SubscriptionInfo":
        found = await mill.topic(topic)
        await found.subscriptions.seek(name, position)
        return await found.subscriptions.info(name)

    info = run(work, server)
    if json_:
        _print_json(info, None)
    else:
        say(f"Moved subscription '{name}': {info.pending:,} messages pending")


@app.command()
def pause(
    topic: TopicArgument,
    name: NameArgument,
    time: Annotated[
        str | None, typer.Option("--for", help="For this long. (default: until 'resume')")
    ] = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Pause delivery to a subscription, for a time or until it is resumed."""
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
    """Resume delivery to a paused subscription."""

    async def work(mill: "Mill") -> None:
        await (await mill.topic(topic)).subscriptions.resume(name)

    run(work, server)
    say(f"Resumed '{name}'")


@app.command("rm")
def remove(
    topic: TopicArgument, name: NameArgument, yes: YesOption = False, server: ServerOption = None
) -> None:
    """Remove a subscription and its position; the events of the topic stay."""
    confirm(f"Remove subscription '{name}' of topic '{topic}'?", yes)

    async def work(mill: "Mill") -> None:
        await (await mill.topic(topic)).subscriptions.delete(name)

    run(work, server)
    say(f"Removed subscription '{name}' of topic '{topic}'")


def _print_json(info: "SubscriptionInfo", lag: "Lag | None") -> None:
    from millstream.cli.views.subscription import subscription_record

    print_json(subscription_record(info, lag))


def _start(text: str) -> "Start":
    from millstream.messaging import Start

    if text == "last":
        return Start.LAST
    found = parse_position(text)
    if found.last is not None:
        raise ConfigError("--start: -N is another offset in each partition; give one position")
    return Start.NEW if found.name == "end" else found.start(0)


def _number_or_none(option: str, text: str, kind: type[int] | type[float]) -> float | None:
    try:
        return None if text == "none" else kind(text)
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is not a number. Give one, or 'none'") from None
