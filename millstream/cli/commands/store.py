"""`millstream store`: event stores, their aggregates, events and past states."""

from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millstream.cli.exits import Exit
from millstream.cli.options.groups import grouped
from millstream.cli.options.schema_file import load_class
from millstream.cli.options.store import (
    AppendOptions,
    ExpectedOption,
    HistoryOptions,
    IdArgument,
    MomentOptions,
    StateOption,
    StoreArgument,
    expected_of,
    named_events,
)
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, YesOption, confirm, run
from millstream.cli.views.left_out import LeftOut
from millstream.errors import ConfigError, MillstreamError, Undecodable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from millstream.event_store.events import AppendReceipt, Loaded, StoredEvent
    from millstream.event_store.info import StoreInfo
    from millstream.event_store.store import EventStore
    from millstream.mill import Mill
    from millstream.projections.diff import RowDiff
    from millstream.schemas.registry.stores import RegisteredEvent

__all__ = ["app"]

app = typer.Typer(
    help="Event stores: aggregates as sequences of typed events, and their states at any time.",
    no_args_is_help=True,
)

# The newest events are looked for in windows of appends, each this many times the one before.
WINDOW_GROWTH: Final = 8


@app.command("ls")
def list_(server: ServerOption = None, json_: JsonOption = False) -> None:
    """List the event stores: their aggregates, appends, size and types of events.

    Deleted aggregates count, because their end is kept.
    """
    from millstream.cli.views import store as view

    infos = run(lambda mill: mill.event_stores(), server)
    if json_:
        print_json([view.list_record(info) for info in infos])
    else:
        view.show_list(infos)


@app.command()
@grouped
def show(
    store: StoreArgument,
    moment: MomentOptions,
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Show this aggregate.")] = None,
    state: StateOption = None,
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Show a store, or the state of an aggregate, now, after a version or at a time.

    If the class of the states cannot be imported from this folder, the last event of each type is
    shown instead.
    """
    if id is None:
        if state is not None or moment.at is not None:
            raise ConfigError("--state and --at are for an aggregate: give an ID")
        _show_store(store, server, json_)
        return
    aggregate, when = id, moment.arguments()

    async def work(mill: "Mill") -> "Loaded[Any] | list[StoredEvent]":
        found = await _open_with_states(mill, store, state)
        if found.folding is None:
            return await _events_at(found, aggregate, when)
        loaded = await _folded(found, aggregate, when)
        return _as_json(found, loaded)

    from millstream.cli.views import store as view

    found = run(work, server)
    if isinstance(found, list):
        view.show_summary(store, aggregate, found, json_)
    else:
        view.show_state(store, found, found.state, json_)


def _show_store(name: str, server: str | None, as_json: bool) -> None:
    from millstream.cli.views import store as view

    async def work(mill: "Mill") -> "tuple[StoreInfo, list[RegisteredEvent]]":
        found = await mill.event_store(name)  # says why, if it is none
        for info in await mill.event_stores():
            if info.name == name:
                return info, list(found.types.events.values())
        raise ConfigError(f"'{name}' is a topic and not an event store")

    info, events = run(work, server)
    if as_json:
        print_json(view.store_record(info, events))
    else:
        view.show_store(info, events)


async def _open_with_states(mill: "Mill", name: str, path: str | None) -> "EventStore":
    """The store with the class of its states; if none was named, without when it is not here."""
    from millstream.schemas.registry.stores import StoreSchemas

    if path is not None:
        return await _open_by(mill, name, path)
    record = await StoreSchemas(mill.schemas, name).record()
    why: object = "it was opened without a class that can be imported"
    if record is not None and record.state is not None:
        try:
            return await _open_by(mill, name, record.state)
        except MillstreamError as error:
            why = error
    found = await mill.event_store(name)
    typer.echo(f"no state: {why}", err=True)
    return found


async def _open_by(mill: "Mill", name: str, path: str, snapshot_version: int = 1) -> "EventStore":
    from millstream.event_store.opening import open_for_states

    cls = load_class(path)
    if not isinstance(cls, type):
        raise ConfigError(f"{path} is not a class")
    return await open_for_states(mill, name, cls, snapshot_version)


async def _folded(store: "EventStore", id: str, when: dict[str, Any]) -> "Loaded[Any]":
    try:
        return await store.load(id, **when)
    except MillstreamError:
        raise
    except Exception as error:  # of the user's class
        raise ConfigError(
            f"the state of '{id}' cannot be made: {type(error).__name__}: {error}"
        ) from error


def _as_json(store: "EventStore", loaded: "Loaded[Any]") -> "Loaded[Any]":
    """The aggregate with its state as JSON; of a class without a schema only what it prints."""
    from dataclasses import replace

    from millstream.cli.views.event_text import value_bytes
    from millstream.schemas.formats.python import is_schema_class

    cls = None if store.folding is None else store.folding.cls
    if store.folding is not None and cls is not None and is_schema_class(cls):
        return replace(loaded, state=store.folding.state_codec(1).encode(loaded.state))
    return replace(loaded, state=value_bytes([repr(loaded.state)])[1:-1])


async def _events_at(store: "EventStore", id: str, when: dict[str, Any]) -> "list[StoredEvent]":
    from millstream.errors import AggregateNotFound
    from millstream.event_store.loading import Moment

    moment = Moment.of(when["at"], when["clock"])
    found = [event async for event in store.events(id) if moment.includes(event)]
    if not found:
        raise AggregateNotFound(store.name, id, str(moment))
    return found


@app.command()
@grouped
def append(
    store: StoreArgument,
    id: IdArgument,
    events: Annotated[
        list[str],
        typer.Argument(
            metavar="EVENT JSON...",
            help="Name and fields of each event; @FILE reads a file, - reads stdin.",
        ),
    ],
    options: AppendOptions,
    expected: ExpectedOption = "any",
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Append events to an aggregate, all together; prints the version that it has then.

    'store append accounts a1 Deposited '{"amount": 5}' --expected 3'. Every event is checked
    against the registered schema of its type.
    """
    from millstream.cli.views import store as view

    version, details = expected_of(expected), options.details()

    async def work(mill: "Mill") -> "AppendReceipt":
        found = await mill.event_store(store)
        return await found.append(id, named_events(found.types, events), version, **details)

    receipt = run(work, server)
    if json_:
        print_json(view.receipt_record(store, receipt))
    else:
        before = " (it was stored before)" if receipt.duplicate else ""
        say(f"Stored: {store}, version {receipt.version}, offset {receipt.offset}{before}")


@app.command()
@grouped
def history(
    store: StoreArgument,
    options: HistoryOptions,
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Only this aggregate.")] = None,
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Print the events of an aggregate, of a category or of the store; --json: one object per line.

    A line has the position, the time of the event, the aggregate, its version, the event's type and
    its fields.
    """
    from millstream.cli.views.store import event_writer

    options.check(id)
    backward, limit, follow = options.backward, options.limit, options.follow
    category = options.category
    write, left_out = event_writer(json_), LeftOut(options.undecodable)

    async def work(mill: "Mill") -> None:
        found = await mill.event_store(store)
        if id is not None:
            events = found.events(
                id, backward=backward, limit=limit, follow=follow, undecodable=left_out
            )
        elif backward and limit is not None:
            events = _newest(found, category, limit, left_out)
        else:
            events = found.all(category=category, follow=follow, undecodable=left_out)
        await _print(events, write, limit)

    run(work, server)
    left_out.finish()


async def _newest(
    store: "EventStore", category: str | None, limit: int, left_out: LeftOut
) -> "AsyncIterator[StoredEvent]":
    """The newest events of all aggregates, the newest first."""
    newest: list[StoredEvent] = []
    problems: dict[tuple[int, int], Undecodable] = {}  # one may be found several times

    def note(error: Undecodable) -> None:
        problems[error.partition, error.offset] = error

    for part in (await store.topic.info()).partitions:
        plan = {"category": category, "partitions": [part.number], "undecodable": note}
        newest += await _last_of(store, limit, part.last_offset, plan)
    for error in problems.values():
        left_out(error)
    newest.sort(key=lambda event: (event.stored_ns, event.offset, event.index), reverse=True)
    for event in newest[:limit]:
        yield event


async def _last_of(
    store: "EventStore", limit: int, last: int, plan: dict[str, Any]
) -> "deque[StoredEvent]":
    """The newest events of a partition; the broker finds them only forward from an offset."""
    from millstream.messaging import Start

    found: deque[StoredEvent] = deque(maxlen=limit)
    window = limit
    while True:
        found.clear()
        start = Start.at_offset(max(1, last - window + 1))
        async for event in store.all(start=start, **plan):
            found.append(event)
        if len(found) == limit or window >= last:
            return found
        window *= WINDOW_GROWTH


async def _print(events: "AsyncIterator[StoredEvent]", write: Any, limit: int | None) -> None:
    from millstream.cli.views.stdout_writer import StdoutWriter

    left = limit
    async with aclosing(events), StdoutWriter() as out:  # type: ignore[type-var]
        async for event in events:
            await out.write(write(event))
            left = None if left is None else left - 1
            if left == 0:
                return


@app.command()
def snapshot(
    store: StoreArgument,
    id: IdArgument,
    state: StateOption = None,
    version: Annotated[
        int,
        typer.Option(
            "--snapshot-version",
            metavar="N",
            min=1,
            help="The 'snapshot_version' of the programs that are to use it.",
        ),
    ] = 1,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Store a snapshot of an aggregate, so that loading it reads only later events."""
    from millstream.cli.views.store import print_change

    async def work(mill: "Mill") -> int:
        from millstream.schemas.registry.stores import StoreSchemas

        path = state
        if path is None:
            record = await StoreSchemas(mill.schemas, store).record()
            path = None if record is None else record.state
        if path is None:
            raise ConfigError(f"the class of the states of '{store}' is not known: give --state")
        return await (await _open_by(mill, store, path, version)).snapshot(id)

    print_change(store, id, "Snapshot", json_, version=run(work, server))


@app.command("rm")
def remove(
    store: StoreArgument,
    id: IdArgument,
    expected: ExpectedOption = "any",
    reusable: Annotated[
        bool, typer.Option("--reusable", help="Keep nothing: the id can begin again.")
    ] = False,
    yes: YesOption = False,
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Delete an aggregate with all its events.

    Its end stays as its last version, and it takes no more events, unless --reusable is given.
    'topic rm STORE' removes a whole store.
    """
    from millstream.cli.views.store import print_change

    version = expected_of(expected)
    confirm(f"Delete '{id}' of store '{store}' with all its events?", yes)

    async def work(mill: "Mill") -> None:
        await (await mill.event_store(store)).delete(id, version, reusable=reusable)

    run(work, server)
    print_change(store, id, "Deleted", json_)


@app.command()
def archive(
    store: StoreArgument,
    id: IdArgument,
    yes: YesOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Move the events of an aggregate to the topic STORE-archive; it takes no more events."""
    from millstream.cli.views.store import print_change

    confirm(f"Move '{id}' of store '{store}' to the archive? It takes no more events then.", yes)

    async def work(mill: "Mill") -> None:
        await (await mill.event_store(store)).archive(id)

    run(work, server)
    print_change(store, id, "Archived", json_)


@app.command()
def erase(
    store: StoreArgument,
    person: Annotated[str, typer.Argument(metavar="PERSON", help="Id of the person.")],
    yes: YesOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Make the personal data of a person unreadable for ever, by removing their key.

    Reaches the store, copies of it and files made from it. Delete backups of STORE-keys yourself,
    and rebuild projections that hold such data.
    """
    from millstream.cli.views.store import print_change

    confirm(f"Make the personal data of '{person}' in store '{store}' unreadable for ever?", yes)

    async def work(mill: "Mill") -> bool:
        return await (await mill.event_store(store)).erase(person)

    if not run(work, server):
        raise ConfigError(f"store '{store}' has no personal data of '{person}'. Check the id")
    print_change(store, person, "Erased", json_)


@app.command()
def diff(
    projection: Annotated[
        str, typer.Argument(metavar="PROJECTION", help="Name of the projection.")
    ],
    version: Annotated[
        int | None,
        typer.Option("--version", metavar="N", help="Which version. (default: the newest)"),
    ] = None,
    against: Annotated[
        int | None,
        typer.Option(
            "--against", metavar="N", help="Compare it with this one. (default: the active one)"
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 4 if a row differs; for scripts.")
    ] = False,
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Show the rows that differ between two versions of a projection, before they are swapped.

    '+' is a row that only the new version has, '-' one that it does not have, '~' a changed one.
    --json: one object per line.
    """
    from millstream.cli.views import projection as view

    async def work(mill: "Mill") -> "tuple[int, int, list[RowDiff]]":
        chosen, first = await _versions(mill, projection, version, against)
        rows = [row async for row in mill.diff_projection(projection, chosen, first)]
        return chosen, first, rows

    with view.comparing():
        newer, older, rows = run(work, server)
    if json_:
        view.print_rows(rows)
    else:
        view.show_rows(projection, (older, newer), rows)
    if rows and check:
        raise typer.Exit(Exit.UNHEALTHY)


async def _versions(
    mill: "Mill", projection: str, version: int | None, against: int | None
) -> tuple[int, int]:
    """The version that is looked at, and the one that it is compared with."""
    from millstream.projections.records import ProjectionRecords

    record = await ProjectionRecords(mill.table, mill.create_table).get(projection)
    chosen = max(record.versions) if version is None else version
    first = record.active if against is None else against
    if chosen == first:
        known = ", ".join(map(str, sorted(record.versions)))
        raise ConfigError(
            f"projection '{projection}': version {chosen} would be compared with itself. It has "
            f"the versions {known}, and {record.active} is active"
        )
    return chosen, first
