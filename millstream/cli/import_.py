"""`millstream import`: the rows of a file become events of a topic."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.file_formats import FormatNameOption, Progress, file_format
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.reading_options import TopicArgument
from millstream.cli.session import ServerOption, run
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.cli.import_events import Columns
    from millstream.cli.import_rows import RowReader
    from millstream.cli.import_writer import EventWriter
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
            help="Name of this import, of which ids are made. (default: the path of the file)"
        ),
    ] = None,
    new_ids: Annotated[
        bool, typer.Option("--new-ids", help="Store every row, also one that was stored before.")
    ] = False,
    from_row: Annotated[
        int, typer.Option("--from-row", min=1, help="Begin with this row, to go on after a stop.")
    ] = 1,
    delimiter: Annotated[
        str | None, typer.Option("--delimiter", "-d", help="What separates the fields of CSV.")
    ] = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Import a file into a topic: JSON lines, CSV or Parquet.

    A file that 'export' wrote becomes the same events again. Of any other file each row is a
    value, as JSON; --key, --time and --id name columns. At least once: ids are made of the file's
    path, the row's number and content, so that running it again within the topic's duplicate
    window stores nothing twice (nor, within it, after a purge: see --new-ids).
    """
    from millstream.cli.import_events import Columns
    from millstream.cli.import_rows import open_rows

    if new_ids and (name is not None or event_id is not None):
        raise ConfigError("--new-ids makes ids of its own; leave --name and --id out")
    if name is None and file != "-":
        name = str(Path(file).resolve())
    chosen = file_format(file, form)
    csv = chosen in ("csv", "tsv")
    columns = Columns(
        key, value, time, event_id, time_unit, whole, None if new_ids else name,
        new_ids=new_ids, empty_is_none=csv,
    )  # fmt: skip
    reader = open_rows(file, chosen, delimiter)
    try:
        stored, again = run(lambda mill: _import(mill, topic, reader, columns, from_row), server)
    finally:
        reader.close()
    if json_:
        print_json({"topic": topic, "file": file, "stored": stored, "duplicates": again})
    else:
        repeated = f"; {again:,} were there before" if again else ""
        say(f"Stored {stored:,} events of {file} in '{topic}'{repeated}")


async def _import(
    mill: "Mill", topic: str, reader: "RowReader", columns: "Columns", first: int
) -> tuple[int, int]:
    from millstream.cli.import_writer import TopicWriter

    writer = TopicWriter(await mill.topic(topic))
    with Progress(f"Importing {reader.file}", reader.total) as progress:
        return await _copy(reader, columns, writer, progress, first)


async def _copy(
    reader: "RowReader",
    columns: "Columns",
    writer: "EventWriter",
    progress: Progress,
    first: int,
) -> tuple[int, int]:
    """Write the rows group by group; how many were stored, and how many had been before."""
    import asyncio

    stored = again = 0
    groups = reader.groups(first)
    reached = first  # every row before it is stored
    try:
        while group := await asyncio.to_thread(next, groups, None):
            if not stored:
                columns = columns.settled(group[0][1])
            events = []
            for row in group:
                try:
                    events.append(columns.event(row))
                except ConfigError as error:
                    raise reader.fault(row[0], error) from error
            again += await writer.write(events)
            stored += len(events)
            reached = group[-1][0] + 1
            progress.show(reader.position, stored)
    except BaseException:
        if reached > first:
            typer.echo(
                f"Rows before {reached:,} are stored. Go on with --from-row {reached}", err=True
            )
        raise
    return stored - again, again
