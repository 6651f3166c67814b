"""`millstream dlq`: the dead letters of subscriptions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.options.bodies import HeaderOption, body_bytes, header_pairs
from millstream.cli.options.groups import grouped
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
    help="Dead letters: events that a subscription gave up on. Show, edit, redrive them.",
    no_args_is_help=True,
)

SubscriptionArgument = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="The subscription that dead-lettered them.")
]
OffsetArgument = Annotated[
    int, typer.Argument(metavar="OFFSET", min=1, help="Offset of the dead letter, see 'dlq ls'.")
]
KeyOption = Annotated[
    list[str] | None,
    typer.Option("--key", "-k", help="Only events with this key; repeat it for more."),
]
CauseOption = Annotated[
    str | None, typer.Option("--cause", help="Only those whose cause contains this text.")
]


@dataclass(frozen=True, slots=True)
class _Selection:
    """Which dead letters of a subscription are meant."""

    key: KeyOption = None
    cause: CauseOption = None
    first: Annotated[
        int | None, typer.Option("--first", min=1, help="Only from this offset on.")
    ] = None
    last: Annotated[int | None, typer.Option("--last", min=1, help="Only up to this offset.")] = (
        None
    )
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="At most N letters, oldest first.")
    ] = None

    def filter(self) -> "DeadLetterFilter":
        """The same as a value of the dead-letter queue."""
        from millstream.messaging.dead_letters.letter import DeadLetterFilter

        keys = tuple(self.key or ())
        return DeadLetterFilter(keys, self.cause, None, self.first, self.last, self.limit)


@app.command("ls")
@grouped
def list_(
    selection: _Selection,
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="The topic; without it, count them all.")
    ] = None,
    subscription: Annotated[
        str | None,
        typer.Argument(metavar="[SUBSCRIPTION]", help="List what this subscription dead-lettered."),
    ] = None,
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
    which = selection.filter()

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
    """Show one dead letter: value, cause, attempts and where it comes from."""
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
    *,
    value: Annotated[
        str | None,
        typer.Option("--value", help="The new value; @FILE reads a file, - reads stdin."),
    ] = None,
    header: HeaderOption = None,
    no_headers: Annotated[
        bool, typer.Option("--no-headers", help="Remove all its headers.")
    ] = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Replace the value or the headers of a dead letter before it is redriven.

    Key, cause, original event and its order are kept; it gets a new offset.
    """
    from millstream.cli.views import dlq as view

    changes: dict[str, Any] = {}
    if header is not None and no_headers:
        raise ConfigError("give --header or --no-headers, not both")
    if header is not None or no_headers:
        changes["headers"] = dict(header_pairs(header))
    data = None if value is None else body_bytes(value)
    if data is None and not changes:
        raise ConfigError("nothing to change: give --value, --header or --no-headers")

    async def work(mill: "Mill") -> "DeadLetter":
        queue = await _queue(mill, topic, subscription)
        if data is not None:
            changes["value"] = view.new_value(await queue.show(offset), data)
        return await queue.edit(offset, **changes)

    letter = run(work, server)
    if json_:
        print_json(view.letter_record(letter))
    else:
        say(f"Changed; the dead letter is now at offset {letter.offset}")


@app.command()
@grouped
def redrive(
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    selection: _Selection,
    to_all: Annotated[
        bool,
        typer.Option(
            "--to-all", help="For all readers, not only the subscription that dead-lettered them."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Redrive dead letters: send them back to their topic, in order and exactly once.

    If it is interrupted, run it again: nothing is sent back twice. Other subscriptions and readers
    of the topic do not see the events again, except with --to-all.
    """
    which = selection.filter()

    async def work(mill: "Mill") -> "RedriveReport":
        queue = await _queue(mill, topic, subscription)
        return await queue.redrive(which, to_all=to_all, dry_run=dry_run)

    report = run(work, server)
    if json_:
        print_json(report)
    elif dry_run:
        say(f"{report.redriven:,} dead letters would be redriven")
    else:
        before = f"; {report.recovered:,} had been redriven before" if report.recovered else ""
        say(f"Redrove {report.redriven:,} dead letters to '{topic}'{before}")


@app.command("rm")
def remove(
    topic: TopicArgument,
    subscription: SubscriptionArgument,
    offset: Annotated[
        int | None, typer.Argument(metavar="[OFFSET]", min=1, help="Only this one.")
    ] = None,
    *,
    key: KeyOption = None,
    cause: CauseOption = None,
    yes: YesOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Remove dead letters permanently: one, those that the options select, or all."""
    which = _Selection(key, cause).filter()
    if offset is not None and (key or cause):
        raise ConfigError("give an offset, or --key and --cause")
    what = "the dead letters" if offset is None else f"the dead letter at {offset}"
    confirm(f"Remove {what} of '{subscription}' permanently?", yes)

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
