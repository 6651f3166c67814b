"""`millstream import`: store the rows of a file as events of a topic."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.files.formats import FileProgress, FormatNameOption, file_format
from millstream.cli.options.groups import grouped
from millstream.cli.options.reading import TopicArgument
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, run
from millstream.errors import ConfigError, Unfit

if TYPE_CHECKING:
    from millstream.cli.files.events import FileColumns
    from millstream.cli.files.rows import FileRowReader
    from millstream.cli.files.writer import RowWriter
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class _ColumnOptions:
    """Which columns of a row become what of an event."""

    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="COLUMN", help="Column with the key.")
    ] = None
    value: Annotated[
        str | None,
        typer.Option(
            "--value", metavar="COLUMN", help="Column with the value, instead of the entire row."
        ),
    ] = None
    time: Annotated[
        str | None, typer.Option("--time", metavar="COLUMN", help="Column with the event's time.")
    ] = None
    time_unit: Annotated[
        str | None, typer.Option(help="Unit of numeric times: s, ms, us or ns since 1970.")
    ] = None
    event_id: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="Column with the event's id.")
    ] = None
    whole: Annotated[
        bool,
        typer.Option("--whole", help="The row is the value, even if it has a column 'value'."),
    ] = False

    def columns(self, form: str) -> "FileColumns":
        """The same for the reader of a file of this format."""
        from millstream.cli.files.events import FileColumns

        csv = form in ("csv", "tsv")
        names = (self.key, self.value, self.time, self.event_id)
        escapes = form == "parquet"
        return FileColumns(*names, self.time_unit, self.whole, empty_is_none=csv, escapes=escapes)


@dataclass(frozen=True, slots=True)
class _Run:
    """Which rows an import stores, and what it remembers."""

    name: Annotated[
        str | None,
        typer.Option(help="Name under which an import can continue. (default: the file's path)"),
    ] = None
    again: Annotated[
        bool, typer.Option("--again", help="Store every row, even if it was stored before.")
    ] = False
    from_row: Annotated[
        int, typer.Option("--from-row", min=1, help="Skip the rows before this one.")
    ] = 1

    def writer_name(self, file: str) -> str | None:
        """The name of the writer, or None for one that remembers nothing."""
        if self.again and self.name is not None:
            raise ConfigError("--again starts a new import; leave --name out")
        if self.name is None and file != "-" and not self.again:
            return str(Path(file).resolve())
        return self.name


@app.command("import")
@grouped
def import_(
    topic: TopicArgument,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file; - is stdin.")],
    chosen: _ColumnOptions,
    how: _Run,
    form: FormatNameOption = None,
    delimiter: Annotated[
        str | None, typer.Option("--delimiter", "-d", help="Separator of the fields of a CSV file.")
    ] = None,
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Import a file into a topic: JSON lines, CSV or Parquet.

    A file that 'export' wrote becomes the same events again. In any other file each row is a value,
    as JSON (in a topic with a schema: of its type); --key, --time and --id name columns.
    Exactly once: an import that was stopped or killed continues after the last stored row when it
    is run again, and once complete it stores nothing more. To store everything again, use --again.
    """
    from millstream.cli.files.rows import open_rows

    name = how.writer_name(file)
    format_name = file_format(file, form)
    columns = chosen.columns(format_name)
    reader = open_rows(file, format_name, delimiter)
    try:
        stored, before = run(
            lambda mill: _import(mill, topic, reader, columns, (name, how.from_row)), server
        )
    finally:
        reader.close()
    if json_:
        print_json({"topic": topic, "file": file, "stored": stored, "stored_before": before})
    else:
        repeated = f"; {before:,} were already stored" if before else ""
        say(f"Stored {stored:,} events of {file} in '{topic}'{repeated}")


async def _import(
    mill: "Mill",
    topic_name: str,
    reader: "FileRowReader",
    columns: "FileColumns",
    start: tuple[str | None, int],
) -> tuple[int, int]:
    """How many rows were stored now, and how many had been stored before."""
    from millstream.cli.files.typed import typed_values
    from millstream.cli.files.writer import open_writer

    topic = await mill.topic(topic_name)
    columns = columns.typed(typed_values(topic))
    writer_name, from_row = start
    async with open_writer(topic, writer_name) as writer:
        first = max(writer.first, from_row)
        with FileProgress(f"Importing {reader.file}", reader.total) as progress:
            stored, skipped = await _copy(reader, columns, writer, progress, first)
    return stored, first - from_row + skipped


async def _copy(
    reader: "FileRowReader",
    columns: "FileColumns",
    writer: "RowWriter",
    progress: FileProgress,
    first: int,
) -> tuple[int, int]:
    """Write the rows from `first` on, group by group.

    Returns how many were stored, and how many had been stored before: the partitions of a topic
    can have come to different rows when an import was stopped.
    """
    import asyncio

    stored = skipped = 0
    groups = reader.groups(first)
    reached = first  # every row before it is stored
    try:
        while group := await asyncio.to_thread(next, groups, None):
            if reached == first:
                columns = columns.settled(group[0][1])
            events = []
            for row in group:
                try:
                    events.append((row[0], columns.event(row)))
                except (ConfigError, Unfit) as error:
                    raise reader.fault(row[0], error) from error
            known = await writer.write(events)
            stored, skipped = stored + len(events) - known, skipped + known
            reached = group[-1][0] + 1
            progress.show(reader.position, stored)
    except BaseException:
        if reached > 1:
            typer.echo(f"Rows before {reached:,} are stored. Run it again to continue", err=True)
        raise
    return stored, skipped
