"""`millstream export`: the events of a topic, or a range of them, in a file."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millstream.cli.files.formats import FileProgress, FormatNameOption, file_format
from millstream.cli.options.groups import grouped
from millstream.cli.options.reading import (
    CountOption,
    RangeOptions,
    Selection,
    TopicArgument,
    ValueOption,
)
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, run
from millstream.cli.views.left_out import LeftOut
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.cli.files.export import EventFile
    from millstream.cli.options.positions import Position
    from millstream.messaging import Event
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()

BATCH_EVENTS: Final = 1000
BATCH_BYTES: Final = 8 * 1024 * 1024  # held before they are written


@dataclass(frozen=True, slots=True)
class _Target:
    """The file, and how it is written."""

    file: Annotated[str, typer.Argument(metavar="FILE", help="The file; - is stdout.")]
    form: FormatNameOption = None
    value: ValueOption = "auto"
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False


@app.command()
@grouped
def export(
    topic: TopicArgument,
    target: _Target,
    events: RangeOptions,
    selection: Selection,
    count: CountOption = None,
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Export a topic, or a range of it, to a file: JSON lines, CSV or Parquet.

    Every event that is stored when it starts is exported once. The file appears under its name when
    it is complete. 'import' turns it into the same events again. An event that cannot be decoded,
    or that the format cannot hold, is named and left out.
    """
    from millstream.cli.files.export import open_file

    file = target.file
    if file == "-" and json_:
        raise ConfigError("--json prints a report, and FILE - prints the events. Choose one")
    start, end = events.positions()
    chosen = file_format(file, target.form)
    left_out = LeftOut(selection.undecodable)
    arguments = {**selection.arguments(), "end": end, "undecodable": left_out}
    plan = _Plan(start, arguments, count)

    async def work(mill: "Mill") -> int:
        out = open_file(file, chosen, target.value, left_out.unwritable, force=target.force)
        try:
            return await _export(mill, topic, plan, out)
        finally:
            out.abandon()

    exported = run(work, server)
    if json_:
        report = {"topic": topic, "file": file, "events": exported, "left_out": left_out.count}
        print_json(report)
    elif file != "-":
        say(f"Exported {exported:,} events of '{topic}' to {file}")
    left_out.finish()


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to read."""

    start: "Position"
    arguments: dict[str, Any]
    count: int | None


async def _export(
    mill: "Mill",
    name: str,
    plan: _Plan,
    out: "EventFile",
) -> int:
    import asyncio
    from contextlib import aclosing

    from millstream.cli.commands.topic_read import events_from
    from millstream.cli.views.event_text import value_bytes

    topic = await mill.topic(name)
    parts = (await topic.info()).partitions
    firsts = {part.number: part.first_offset for part in parts}
    total = sum(part.last_offset - part.first_offset + 1 for part in parts)
    reached: dict[int, int] = {}
    events = await events_from(topic, plan.start, plan.arguments)
    group: list[Event] = []
    exported = taken = size = 0
    with FileProgress(f"Exporting {name}", total) as progress:
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                group.append(event)
                size += len(value_bytes(event.value))
                reached[event.partition] = event.offset
                taken += 1
                if len(group) >= BATCH_EVENTS or size >= BATCH_BYTES:
                    exported += await asyncio.to_thread(out.write, group)
                    done = sum(offset - firsts[part] + 1 for part, offset in reached.items())
                    progress.show(done, exported)
                    group, size = [], 0
                if taken == plan.count:
                    break
        exported += await asyncio.to_thread(out.write, group)
        await asyncio.to_thread(out.complete)
        progress.show(total, exported)
    return exported
