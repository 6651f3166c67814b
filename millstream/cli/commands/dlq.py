"""`millstream dlq`: events that a subscription gave up."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.options.bodies import HeaderOption, body_bytes, header_pairs
from millstream.cli.options.reading import TopicArgument
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, YesOption, confirm, run
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.messaging.dead_letters.letter import DeadLetter, DeadLetterFilter
    from millstream.messaging.dead_letters.queue import DeadLetterQueue, RedriveReport
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer(
    help="Dead letters: events that a subscription gave up. Look, repair, bring them back.",
    no_args_is_help=True,
)

SubscriptionArgument = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="The subscription that gave them up.")
]
OffsetArgument = Annotated[
    int, typer.Argument(metavar="OFFSET", min=1, help="Offset of the dead letter, see 'dlq ls'.")
]
KeyOption = Annotated[
    list[str] | None, typer.Option("--key", "-k", help="Only of this key; repeat it for more.")
]
CauseOption = Annotated[
    str | None, typer.Option("--cause", help="Only those whose cause has these words.")
]
FirstOption = Annotated[int | None, typer.Option("--first", min=1, help="From this offset on.")]
LastOption = Annotated[int | None, typer.Option("--last", min=1, help="Up to this offset.")]
LimitOption = Annotated[
    int | None, typer.Option("--limit", "-n", min=1, help="So many at most, the oldest first.")
]


@app.command("ls")
def list_(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="Topic; without it all are counted.")
    ] = None,
    subscription: Annotated[
        str | None, typer.Argument(metavar="[SUBSCRIPTION]", help="List what this one gave up.")
    ] = None,
    key: KeyOption = None,
    cause: CauseOption = None,
    first: FirstOption = None,
    last: LastOption = None,
    limit: LimitOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """List the dead letters of a subscription, the oldest first; without one, count them all."""
    from millstream.cli.views import dlq as view

    if topic is None or subscription is None:
        counts = run(lambda mill: view.count(mill, topic), server)
        if json_:
            print_json(counts)
        else:
            view.show_counts(counts)
        return
    which = _filter(key, cause, first, last, limit)

    async def work(mill: "Mill") -> "list[DeadLetter]":
        return await (await _queue(mill, topic, subscription)).list(which)

    letters = run(work, server)
    if json_:
        print_json([view.letter_record(letter) for letter in letters])
    else:
        view.show_list(letters)


@app.command()
def show(
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    offset: OffsetArgument,
    raw: Annotated[bool, typer.Option("--raw", "-r", help="Print the bare value.")] = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Show one dead letter: value, cause, attempts and origin."""
    from millstream.cli.views import dlq as view
    from millstream.cli.views.event_text import value_bytes

    async def work(mill: "Mill") -> "DeadLetter":
        return await (await _queue(mill, topic, subscription)).show(offset)

    letter = run(work, server)
    if raw:
        typer.echo(value_bytes(letter.value), nl=False)
    elif json_:
        print_json(view.letter_record(letter))
    else:
        view.show(letter)


@app.command()
def edit(
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    offset: OffsetArgument,
    value: Annotated[
        str | None, typer.Option("--value", help="The new value; @FILE a file, - what is piped in.")
    ] = None,
    header: HeaderOption = None,
    no_headers: Annotated[
        bool, typer.Option("--no-headers", help="Take all its headers away.")
    ] = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Replace the value or the headers of a dead letter before it is brought back.

    Key, cause, origin and its place in the order are kept; it gets a new offset.
    """
    from millstream.cli.views import dlq as view

    changes: dict[str, Any] = {}
    if header is not None and no_headers:
        raise ConfigError("give --header or --no-headers, not both")
    if header is not None or no_headers:
        changes["headers"] = dict(header_pairs(header))
    data = None if value is None else body_bytes(value)
    if data is None and not changes:
        raise ConfigError("say what to change: --value, --header or --no-headers")

    async def work(mill: "Mill") -> "DeadLetter":
        queue = await _queue(mill, topic, subscription)
        if data is not None:
            changes["value"] = view.new_value(await queue.show(offset), data)
        return await queue.edit(offset, **changes)

    letter = run(work, server)
    if json_:
        print_json(view.letter_record(letter))
    else:
        say(f"Changed; the dead letter now has the offset {letter.offset}")


@app.command()
def redrive(
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    key: KeyOption = None,
    cause: CauseOption = None,
    first: FirstOption = None,
    last: LastOption = None,
    limit: LimitOption = None,
    to_all: Annotated[
        bool,
        typer.Option("--to-all", help="For all who read it, not only the one that gave them up."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Bring dead letters back into their topic, in order and exactly once.

    When it is interrupted, run it again: what was brought back is not brought back twice. Other
    subscriptions and readers of the topic do not see it again, unless with --to-all.
    """
    which = _filter(key, cause, first, last, limit)

    async def work(mill: "Mill") -> "RedriveReport":
        queue = await _queue(mill, topic, subscription)
        return await queue.redrive(which, to_all=to_all, dry_run=dry_run)

    report = run(work, server)
    if json_:
        print_json(report)
    elif dry_run:
        say(f"{report.redriven:,} dead letters would be brought back")
    else:
        before = f"; {report.recovered:,} had been before" if report.recovered else ""
        say(f"Brought {report.redriven:,} dead letters back into '{topic}'{before}")


@app.command("rm")
def remove(
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    offset: Annotated[
        int | None, typer.Argument(metavar="[OFFSET]", min=1, help="Only this one.")
    ] = None,
    key: KeyOption = None,
    cause: CauseOption = None,
    yes: YesOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Remove dead letters for good: one, those that the options name, or all."""
    which = _filter(key, cause, None, None, None)
    if offset is not None and (key or cause):
        raise ConfigError("give an offset, or --key and --cause")
    what = "the dead letters" if offset is None else f"the dead letter at {offset}"
    confirm(f"Remove {what} of '{subscription}' for good?", yes)

    async def work(mill: "Mill") -> int:
        queue = await _queue(mill, topic, subscription)
        if offset is None:
            return await queue.purge(which)
        await queue.delete(offset)
        return 1

    removed = run(work, server)
    if json_:
        print_json({"topic": topic, "subscription": subscription, "removed": removed})
    else:
        say(f"Removed {removed:,} dead letters of '{subscription}'")


async def _queue(mill: "Mill", topic: str, subscription: str) -> "DeadLetterQueue":
    return await (await mill.topic(topic)).dead_letters(subscription)


def _filter(
    key: list[str] | None, cause: str | None, first: int | None, last: int | None, limit: int | None
) -> "DeadLetterFilter":
    from millstream.messaging.dead_letters.letter import DeadLetterFilter

    return DeadLetterFilter(tuple(key or ()), cause, None, first, last, limit)
