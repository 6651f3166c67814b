"""`millstream cdc`: capture the changes of a database, and apply topics to one."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.exits import Exit
from millstream.cli.options.groups import grouped
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, YesOption, confirm, run
from millstream.errors import CaptureBusy, CaptureNotRunning, ConfigError, MillstreamError
from millstream.settings import environment, hide_password, parse_duration

if TYPE_CHECKING:
    from millstream.cdc.settings import CaptureSettings
    from millstream.cdc.status import CaptureStatus
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help="Change data capture: tables of a database to topics, and topics to tables, exactly once.",
)

FileArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE]",
        help="Settings of the capture. (default: cdc.toml in this folder, or the table cdc of the "
        "nearest millstream.toml)",
    ),
]
_PLACEHOLDER = "postgresql://postgres@localhost/postgres"


def _load(file: Path | None) -> "CaptureSettings":
    from millstream.cdc.settings_file import load_capture

    return load_capture(file)


@app.command()
def init(
    file: Annotated[
        Path, typer.Argument(metavar="[FILE]", help="The file to write; it must not exist.")
    ] = Path("cdc.toml"),
    source: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The database: postgresql://user@host/database, mysql://user@host/database or "
            "sqlite:///file.",
        ),
    ] = None,
    tables: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Tables to capture; repeat it for more. (default: *)"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the capture. (default: like that of the database)"),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Write a settings file with all settings explained, and list the tables of the database.

    A password in the URL is used to look at the database and is not written to the file.
    """
    from millstream.cdc.settings import CaptureSettings
    from millstream.cdc.settings_file import check_capture, source_address, without_password
    from millstream.cdc.template import (
        PASSWORD_VARIABLE,
        capture_name,
        settings_text,
        write_settings,
    )

    address = source or _PLACEHOLDER
    chosen = name or ("capture" if source is None else capture_name(address))
    wanted = tuple(tables or ["*"])
    full = source_address(address, None, file.absolute().parent)
    settings = CaptureSettings(name=chosen, source=full, tables=wanted)
    check_capture(settings)
    write_settings(file, settings_text(chosen, address, wanted))
    found, problem = ([], None) if source is None else _tables_of(settings)
    if json_:
        names = [table.full_name for table in found]
        print_json({"file": file, "name": chosen, "tables": names, "problem": problem})
        return
    say(f"Wrote {file}. Check it with: millstream cdc check{_named(file)}")
    if without_password(address)[1] is not None:
        say(f"The password is not in it: set the environment variable {PASSWORD_VARIABLE}.")
    if problem is not None:
        say(f"The tables are not known yet: {problem}")
    elif found:
        from millstream.cli.views.cdc import show_tables

        show_tables(settings, found)
    elif source is not None:
        say("The database has no tables that fit.")


def _named(file: Path) -> str:
    return "" if file == Path("cdc.toml") else f" {file}"


def _tables_of(settings: "CaptureSettings") -> tuple[list[Any], str | None]:
    """The tables that the settings mean, or why they are not known."""
    import asyncio

    from millstream.cdc.serving import list_tables

    try:
        return asyncio.run(list_tables(settings)), None
    except MillstreamError as error:
        return [], str(error)


@app.command()
def check(file: FileArgument = None, json_: JsonOption = False) -> None:
    """Say what is missing for a capture, with the statement or setting that adds it.

    Nothing is created or changed. Exit code 4 if something is missing.
    """
    import asyncio

    from millstream.cdc.serving import check_source
    from millstream.cli.views import cdc as view

    settings = _load(file)
    findings, tables = asyncio.run(check_source(settings))
    missing = any(not found.ok and found.fatal for found in findings)
    if json_:
        topics = {
            table.full_name: settings.topic_of(table.namespace, table.name) for table in tables
        }
        print_json(
            {
                "name": settings.name,
                "source": hide_password(settings.source),
                "ok": not missing,
                "findings": [view.finding_record(found) for found in findings],
                "tables": topics,
            }
        )
    else:
        view.show_findings(findings)
        if tables and not missing:
            view.show_tables(settings, tables)
    if missing:
        raise typer.Exit(Exit.UNHEALTHY)


@app.command("run")
def run_(
    file: FileArgument = None,
    server: ServerOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing while it runs.")] = (
        False
    ),
    once: Annotated[bool, typer.Option("--once", help="End when it has caught up.")] = False,
    json_: JsonOption = False,
) -> None:
    """Run a capture until Ctrl-C, SIGTERM or 'millstream cdc stop': exit code 0 then.

    The first run writes a snapshot of the rows that there are, and then every change. A run that
    was interrupted, in whatever way, is continued: nothing is lost or written twice. The source is
    checked first (exit code 4). 'millstream up --cdc FILE' runs a capture with the broker.
    """
    from millstream.cdc.serving import check_source, serve_capture
    from millstream.cli.stopping import stopped_by_signals
    from millstream.cli.views import cdc as view

    settings = _load(file)

    async def work(mill: "Mill") -> "CaptureStatus | None":
        findings, _ = await check_source(settings)
        wrong = [found for found in findings if not found.ok]
        if not json_ and not quiet:
            view.show_findings(wrong)
        if any(found.fatal for found in wrong):
            if json_ or quiet:
                typer.echo("; ".join(f"{one.subject}: {one.text}" for one in wrong), err=True)
            return None
        with view.shown_live(quiet=quiet, as_json=json_) as watch:
            return await serve_capture(mill, settings, stopped_by_signals(), watch, once=once)

    status = run(work, server)
    if status is None:
        raise typer.Exit(Exit.UNHEALTHY)
    if not json_ and not quiet:
        how = "has caught up" if once else "was stopped"
        say(f"The capture '{settings.name}' {how}. 'millstream cdc run' continues it.")


@app.command()
def status(
    file: FileArgument = None, server: ServerOption = None, json_: JsonOption = False
) -> None:
    """Show a running capture: tables, snapshot, changes, lag, errors.

    If it is not running: how far it is behind, as the database sees it, with exit code 3. Exit code
    4 if it has a problem or an alarm.
    """
    from millstream.cdc.control import ask_status
    from millstream.cli.views import cdc as view

    settings = _load(file)

    async def work(mill: "Mill") -> "CaptureStatus | None":
        try:
            return await ask_status(mill, settings.name)
        except CaptureNotRunning:
            return None

    found = run(work, server)
    if found is None:
        _show_stopped(settings, json_)
        raise typer.Exit(Exit.NOT_RUNNING)
    if json_:
        print_json({"running": True, **found.to_json()})
    else:
        view.show_status(found)
    if found.error or found.alarms:
        raise typer.Exit(Exit.UNHEALTHY)


def _show_stopped(settings: "CaptureSettings", json_: bool) -> None:
    """A capture that does not run, and what the source says about it."""
    import asyncio

    from millstream.cdc.serving import source_lag
    from millstream.cli.views.cdc import lag_text

    lag, problem = None, None
    try:
        lag = asyncio.run(source_lag(settings))
    except MillstreamError as error:
        problem = str(error)
    if json_:
        facts = {
            "running": False,
            "name": settings.name,
            "source": hide_password(settings.source),
            "lag": lag,
            "error": problem,
        }
        print_json(facts)
        return
    say(f"{settings.name}: not running, {hide_password(settings.source)}")
    say(lag_text(lag) if lag is not None else f"lag: not known: {problem}")


@app.command()
def stop(
    file: FileArgument = None,
    server: ServerOption = None,
    timeout: Annotated[str, typer.Option(help="How long to wait until it has stopped.")] = "60s",
    json_: JsonOption = False,
) -> None:
    """Stop a running capture, wherever it runs, and wait until it has stored what it had.

    A capture that runs with the broker stays stopped until the broker is started again.
    """
    from millstream.cdc.control import ask_stop

    settings = _load(file)
    seconds = parse_duration(timeout)
    run(lambda mill: ask_stop(mill, settings.name, seconds), server)
    if json_:
        print_json({"name": settings.name, "stopped": True})
    else:
        say(f"The capture '{settings.name}' has stopped.")


@app.command()
def reset(
    file: FileArgument = None,
    table: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Only this table, such as public.orders.")
    ] = None,
    keep_topics: Annotated[
        bool,
        typer.Option(
            "--keep-topics",
            help="Keep what is stored: the next snapshot follows an event of op 't' (all rows "
            "before are gone).",
        ),
    ] = False,
    *,
    server: ServerOption = None,
    yes: YesOption = False,
    json_: JsonOption = False,
) -> None:
    """Forget a capture or one table of it: the next run begins with a new snapshot.

    Removes what it created at the database, its records and its topics. Refused while it runs.
    """
    from millstream.cdc.capture import Capture
    from millstream.cdc.control import ask_status
    from millstream.cdc.sources import open_source

    settings = _load(file)
    what = f"table {table} of the capture" if table else "the capture"
    topics = "Its topics are kept" if keep_topics else "Its topics are deleted with their events"
    confirm(f"Reset {what} '{settings.name}': the next run begins with a snapshot. {topics}.", yes)

    async def work(mill: "Mill") -> list[str]:
        try:
            await ask_status(mill, settings.name)
        except CaptureNotRunning:
            return await Capture(mill, open_source(settings), settings).reset(table, keep_topics)
        raise CaptureBusy(settings.name)

    deleted = run(work, server)
    if json_:
        print_json({"name": settings.name, "table": table, "deleted_topics": deleted})
        return
    gone = f" Deleted {', '.join(deleted)}." if deleted else ""
    say(f"Reset {what} '{settings.name}'.{gone}")


@dataclass(frozen=True, slots=True)
class _Target:
    """The table that a topic is applied to."""

    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="URL",
            help="The database: postgresql://user@host/database or sqlite:///file.",
        ),
    ]
    table: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE", help="The table, such as public.orders. (default: as the topic)"
        ),
    ] = None
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="A column of the key; repeat it for more. (default: as captured, or the table's "
            "primary key)",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the position, which is stored in the database. (default: TABLE)"
        ),
    ] = None
    create: Annotated[
        bool,
        typer.Option(
            "--create/--no-create", help="Create the table and its new columns if missing."
        ),
    ] = True
    password_env: Annotated[
        str | None,
        typer.Option(
            metavar="VARIABLE",
            help="Environment variable with the password. (default: PGPASSWORD or ~/.pgpass)",
        ),
    ] = None

    @property
    def url(self) -> str:
        """The address with its password."""
        if self.password_env is None:
            return self.to
        from millstream.cdc.settings_file import with_password

        password = environment(self.password_env)
        if password is None:
            raise ConfigError(f"--password-env: the variable {self.password_env} is not set")
        return with_password(self.to, password)


@app.command()
@grouped
def apply(
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="A topic of changes or rows, or a table.")
    ],
    target: _Target,
    *,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow/--once", help="Go on with events that are stored later, or end with the last."
        ),
    ] = True,
    workers: Annotated[
        int, typer.Option(min=1, help="Connections that share the keys; PostgreSQL only.")
    ] = 1,
    server: ServerOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing while it runs.")] = (
        False
    ),
    json_: JsonOption = False,
) -> None:
    """Apply a topic to a table of a database: upserts and deletes by key, exactly once.

    Rows and the position are stored in one transaction, so a run that was interrupted is continued
    where the table is. Ends at Ctrl-C or SIGTERM with exit code 0.
    """
    from millstream.cdc.sink.apply import Applied, Apply, ApplySettings
    from millstream.cli.stopping import stopped_by_signals
    from millstream.cli.views import cdc as view

    settings = ApplySettings(
        table=target.table,
        key=tuple(target.key or ()),
        name=target.name or "",
        workers=workers,
        follow=follow,
        create=target.create,
    )

    async def work(mill: "Mill") -> Applied:
        applying = Apply(mill, topic, target.url, settings)
        with view.applied_live(topic, lambda: applying.applied, quiet=quiet or json_):
            return await applying.run(stopped_by_signals())

    done = run(work, server)
    if json_:
        print_json(view.applied_record(topic, done))
    elif not quiet:
        say(view.applied_text(topic, done))
