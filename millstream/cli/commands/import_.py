"""`millstream import`: the rows of a file become events of a topic."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.files.formats import FormatNameOption, Progress, file_format
from millstream.cli.options.reading import TopicArgument
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, run
from millstream.errors import ConfigError, Unfit

if TYPE_CHECKING:
    from millstream.cli.files.events import Columns
    from millstream.cli.files.rows import RowReader
    from millstream.cli.files.writer import RowWriter
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()


@app.command("import")
def import_(
    topic: TopicArgument,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file; - is what is piped in.")],
    form: FormatNameOption = None,
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="COLUMN", help="Column with the key.")
    ] = None,
    value: Annotated[
        str | None,
        typer.Option("--value", metavar="COLUMN", help="Column with the value, instead of all."),
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="COLUMN", help="Column with the event's time.")
    ] = None,
    time_unit: Annotated[
        str | None, typer.Option(help="Unit of times that are numbers: s, ms, us or ns since 1970.")
    ] = None,
    event_id: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="Column with the event's id.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="The row is the value, also if it has a column 'value'.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of this import, by which it goes on. (default: the path of the file)"
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Store every row, also those stored before.")
    ] = False,
    from_row: Annotated[
        int, typer.Option("--from-row", min=1, help="Leave out the rows before this one.")
    ] = 1,
    delimiter: Annotated[
        str | None, typer.Option("--delimiter", "-d", help="What separates the fields of CSV.")
    ] = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Import a file into a topic: JSON lines, CSV or Parquet.

    A file that 'export' wrote becomes the same events again. Of any other file each row is a
    value, as JSON (in a topic with a schema: of its type); --key, --time and --id name columns.
    Exactly once: stopped or killed and run again it goes on behind the last row that is stored,
    and run again after the end it stores nothing. See --again for the other wish.
    """
    from millstream.cli.files.events import Columns
    from millstream.cli.files.rows import open_rows

    if again and name is not None:
        raise ConfigError("--again is an import of its own; leave --name out")
    if name is None and file != "-" and not again:
        name = str(Path(file).resolve())
    chosen = file_format(file, form)
    csv = chosen in ("csv", "tsv")
    columns = Columns(key, value, time, event_id, time_unit, whole, empty_is_none=csv)
    reader = open_rows(file, chosen, delimiter)
    try:
        stored, before = run(
            lambda mill: _import(mill, topic, reader, columns, (name, from_row)), server
        )
    finally:
        reader.close()
    if json_:
        print_json({"topic": topic, "file": file, "stored": stored, "stored_before": before})
    else:
        repeated = f"; {before:,} were there before" if before else ""
        say(f"Stored {stored:,} events of {file} in '{topic}'{repeated}")


async def _import(
    mill: "Mill",
    name: str,
    reader: "RowReader",
    columns: "Columns",
    place: tuple[str | None, int],
) -> tuple[int, int]:
    """How many rows were stored, and how many had been before."""
    from millstream.cli.files.typed import typed_values
    from millstream.cli.files.writer import open_writer

    topic = await mill.topic(name)
    columns = columns.typed(typed_values(topic))
    import_name, from_row = place
    async with open_writer(topic, import_name) as writer:
        first = max(writer.first, from_row)
        with Progress(f"Importing {reader.file}", reader.total) as progress:
            stored = await _copy(reader, columns, writer, progress, first)
    return stored, first - from_row


async def _copy(
    reader: "RowReader",
    columns: "Columns",
    writer: "RowWriter",
    progress: Progress,
    first: int,
) -> int:
    """Write the rows from `first` on, group by group; how many that were."""
    import asyncio

    stored = 0
    groups = reader.groups(first)
    reached = first  # every row before it is stored
    try:
        while group := await asyncio.to_thread(next, groups, None):
            if not stored:
                columns = columns.settled(group[0][1])
            events = []
            for row in group:
                try:
                    events.append((row[0], columns.event(row)))
                except (ConfigError, Unfit) as error:
                    raise reader.fault(row[0], error) from error
            stored += len(events) - await writer.write(events)
            reached = group[-1][0] + 1
            progress.show(reader.position, stored)
    except BaseException:
        if reached > 1:
            typer.echo(f"Rows before {reached:,} are stored. Run it again to go on", err=True)
        raise
    return stored
