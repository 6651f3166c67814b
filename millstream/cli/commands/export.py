"""`millstream export`: the events of a topic, or a range of them, in a file."""

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millstream.cli.files.formats import FormatNameOption, Progress, file_format
from millstream.cli.options.reading import (
    PLACE_HELP,
    CountOption,
    KeyOption,
    PartitionOption,
    SubjectOption,
    TopicArgument,
    ValueOption,
)
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, run
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.cli.files.export import EventFile
    from millstream.cli.options.positions import Place
    from millstream.messaging import Event
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()

EVENTS_AT_ONCE: Final = 1000
BYTES_AT_ONCE: Final = 8 * 1024 * 1024  # held before they are written


@app.command()
def export(
    topic: TopicArgument,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file; - is stdout.")],
    form: FormatNameOption = None,
    start: Annotated[
        str, typer.Option("--start", metavar="PLACE", help=f"Where to begin: {PLACE_HELP}.")
    ] = "beginning",
    end: Annotated[
        str,
        typer.Option("--end", metavar="PLACE", help="Where to end, exclusive: an offset or @TIME."),
    ] = "end",
    count: CountOption = None,
    key: KeyOption = None,
    subject: SubjectOption = None,
    partition: PartitionOption = None,
    value: ValueOption = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Export a topic, or a range of it, to a file: JSON lines, CSV or Parquet.

    What is stored when it begins is exported, each event once. The file appears under its name
    when it is complete. 'import' makes the same events of it again.
    """
    from millstream.cli.commands.topic_read import plan_end
    from millstream.cli.files.export import open_file
    from millstream.cli.options.positions import place

    if file == "-" and json_:
        raise ConfigError("--json prints a report, and FILE - prints the events. Choose one")
    begin, until = place(start), plan_end(end)
    chosen = file_format(file, form)
    choices = {
        "keys": key or (), "subjects": subject or (), "partitions": partition, "end": until,
    }  # fmt: skip

    async def work(mill: "Mill") -> int:
        out = open_file(file, chosen, value, force=force)
        try:
            return await _export(mill, topic, (begin, choices, count), out)
        finally:
            out.abandon()

    events = run(work, server)
    if json_:
        print_json({"topic": topic, "file": file, "events": events})
    elif file != "-":
        say(f"Exported {events:,} events of '{topic}' to {file}")


async def _export(
    mill: "Mill",
    name: str,
    what: "tuple[Place, dict[str, Any], int | None]",
    out: "EventFile",
) -> int:
    import asyncio
    from contextlib import aclosing

    from millstream.cli.commands.topic_read import events_from
    from millstream.cli.views.event_text import value_bytes

    begin, choices, count = what
    topic = await mill.topic(name)
    parts = (await topic.info()).partitions
    firsts = {part.number: part.first_offset for part in parts}
    total = sum(part.last_offset - part.first_offset + 1 for part in parts)
    reached: dict[int, int] = {}
    events = await events_from(topic, begin, choices)
    group: list[Event] = []
    exported = size = 0
    with Progress(f"Exporting {name}", total) as progress:
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                group.append(event)
                size += len(value_bytes(event.value))
                reached[event.partition] = event.offset
                exported += 1
                if len(group) >= EVENTS_AT_ONCE or size >= BYTES_AT_ONCE:
                    await asyncio.to_thread(out.write, group)
                    done = sum(offset - firsts[part] + 1 for part, offset in reached.items())
                    progress.show(done, exported)
                    group, size = [], 0
                if exported == count:
                    break
        await asyncio.to_thread(out.write, group)
        await asyncio.to_thread(out.complete)
        progress.show(total, exported)
    return exported
