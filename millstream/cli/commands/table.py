"""`millstream table`: the latest value of each key."""

from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.options.bodies import BodyArgument, body_bytes
from millstream.cli.options.reading import CountOption, UndecodableOption
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, YesOption, confirm, run
from millstream.cli.views.left_out import LeftOut
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from millstream.cli.views.table import LineOf
    from millstream.mill import Mill
    from millstream.tables import Change, Entry, Table

__all__ = ["app"]

app = typer.Typer(
    help="Tables: the latest value of each key. 'topic create NAME --history 1' creates one.",
    no_args_is_help=True,
)

TableArgument = Annotated[str, typer.Argument(metavar="TABLE", help="Name of the table.")]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key.")]
PrefixOption = Annotated[str, typer.Option("--prefix", help="Only keys that start with this text.")]
AtOption = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="TIME",
        help="As the table was at this time of storing: 2026-01-31T12:00Z, '2026-01-31 12:00' "
        "(local time), or 10m (ten minutes ago).",
    ),
]
ExpectOption = Annotated[
    int | None,
    typer.Option(
        "--expect",
        metavar="REVISION",
        min=0,
        help="Only if this is still the key's latest revision; 0: only if it never had a value.",
    ),
]


@app.command("ls")
def list_(
    table: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="List the keys of this table.")
    ] = None,
    prefix: PrefixOption = "",
    at: AtOption = None,
    undecodable: UndecodableOption = "fail",
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """List the tables; with a TABLE, its keys with revision, time and value.

    With --json the entries of a table are one object per line. With --at, keys whose value of then
    is not known any more are an error, after the others.
    """
    from millstream.cli.options.times import moment
    from millstream.cli.views import table as view

    if table is None:
        if prefix or at is not None:
            option = "--prefix selects keys" if prefix else "--at is about keys"
            raise ConfigError(f"{option}: give a table")
        infos = run(lambda mill: mill.tables(), server)
        if json_:
            print_json([view.table_record(info) for info in infos])
        else:
            view.show_list(infos)
        return
    name, left_out, write = table, LeftOut(undecodable), view.line_writer(json_)

    async def work(mill: "Mill") -> None:
        found = await mill.table(name)
        opened = found if at is None else await found.at(moment(at, local=True))
        await _print(opened.entries(undecodable=left_out), write, prefix, None)

    run(work, server)
    left_out.finish()


@app.command()
def get(
    table: TableArgument,
    key: KeyArgument,
    raw: Annotated[
        bool, typer.Option("--raw", "-r", help="Print the exact bytes, without a line end.")
    ] = False,
    at: AtOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Print the value of a key; exit code 1 if it has none, or with --at if it is not known."""
    from millstream.cli.options.times import moment
    from millstream.cli.views.event_text import json_line, shown, value_bytes
    from millstream.cli.views.table import entry_record

    if raw and json_:
        raise ConfigError("choose one of --raw and --json")

    async def work(mill: "Mill") -> "Entry":
        found = await mill.table(table)
        if at is not None:
            past = await found.at(moment(at, local=True))
            if (entry := await past.get(key)) is None:
                raise ConfigError(f"table '{table}' had no key '{key}' at {past.time.isoformat()}")
            return entry
        entry = await found.get(key)
        if entry is None:
            raise _missing(table, key, await found.revision(key))
        return entry

    entry = run(work, server)
    if json_:
        typer.echo(json_line(entry_record(entry)), nl=False)
    else:
        value = value_bytes(entry.value)
        typer.echo(value if raw else shown(value), nl=not raw)


@app.command()
def put(
    table: TableArgument,
    key: KeyArgument,
    body: BodyArgument = None,
    expect: ExpectOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Set the value of a key, which is JSON if the table has a schema; prints its new revision."""
    from millstream.cli.options.events import typed_value

    data = body_bytes(body)

    async def work(mill: "Mill") -> int:
        found = await mill.table(table)
        return await found.put(key, typed_value(found.topic, data), revision=expect)

    _print_change(table, "Stored", run(work, server), json_)


@app.command("rm")
def remove(
    table: TableArgument,
    key: KeyArgument,
    expect: ExpectOption = None,
    yes: YesOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Delete a key; readers that follow the table see the deletion."""
    confirm(f"Delete key '{key}' of table '{table}'?", yes)

    async def work(mill: "Mill") -> int:
        found = await mill.table(table)
        if not await found.revision(key):
            raise _missing(table, key, 0)
        return await found.delete(key, revision=expect)

    _print_change(table, "Deleted", run(work, server), json_)


@app.command()
def watch(
    table: TableArgument,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="Only these keys.")
    ] = None,
    *,
    prefix: PrefixOption = "",
    new: Annotated[
        bool, typer.Option("--new", help="Only changes from now on, not the current values.")
    ] = False,
    count: CountOption = None,
    undecodable: UndecodableOption = "fail",
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Print the current values, then every change, until Ctrl-C; --json: one object per line.

    A deletion has the value null.
    """
    from millstream.cli.views.table import line_writer

    if keys and prefix:
        raise ConfigError("give keys, or --prefix")
    left_out, write = LeftOut(undecodable), line_writer(json_)

    async def work(mill: "Mill") -> None:
        from millstream.messaging import Start

        start = Start.NEW if new else Start.LAST_PER_KEY
        found: Table = await mill.table(table)
        changes = found.changes(keys or (), start=start, undecodable=left_out)
        await _print(changes, write, prefix, count)

    run(work, server)
    left_out.finish()


async def _print(
    entries: "AsyncIterator[Entry] | AsyncIterator[Change]",
    write: "LineOf",
    prefix: str,
    count: int | None,
) -> None:
    from contextlib import aclosing

    from millstream.cli.views.stdout_writer import StdoutWriter

    async with aclosing(entries), StdoutWriter() as out:  # type: ignore[type-var]
        async for entry in entries:
            if not entry.key.startswith(prefix):
                continue
            await out.write(write(entry))
            if count is not None:
                count -= 1
                if not count:
                    return


def _missing(table: str, key: str, revision: int) -> ConfigError:
    if revision:
        return ConfigError(f"key '{key}' of table '{table}' is deleted (revision {revision})")
    return ConfigError(f"table '{table}' has no key '{key}'")


def _print_change(table: str, verb: str, revision: int, as_json: bool) -> None:
    if as_json:
        print_json({"table": table, "revision": revision})
    else:
        say(f"{verb}: {table}, revision {revision}")
