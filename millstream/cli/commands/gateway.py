"""`millstream gateway`: clients of other protocols, such as Kafka's, on the broker's topics."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.exits import Exit
from millstream.cli.options.groups import OptionGroup, declared_option, grouped
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, connection_settings, local_folder, run
from millstream.declared import Form, declared_fields, default_text
from millstream.gateways.protocols import PROTOCOLS, ProtocolEntry
from millstream.gateways.settings_file import chosen_values, make_settings, variable_of

if TYPE_CHECKING:
    import inspect

    from millstream.gateways.status import GatewayStatus
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help="Gateways: clients of other protocols, such as Kafka's, on the topics of the broker.",
)
runs = typer.Typer(no_args_is_help=True, help="Run a gateway until it is stopped.")
app.add_typer(runs, name="run")


def _options(entry: ProtocolEntry) -> "Iterator[inspect.Parameter]":
    """The options of a gateway, from its declared settings."""
    for item, declaration in declared_fields(entry.settings()):
        if declaration.form is Form.TABLES:
            continue
        name = declaration.name or item.name
        shown = default_text(declaration, item.default)
        text = f"{declaration.help} (env: {variable_of(entry, name)})"
        if shown:
            text += f" (default: {shown})"
        yield declared_option(name, replace(declaration, help=text, env=""))


def _add(entry: ProtocolEntry) -> None:
    """The command that runs a gateway of that protocol."""

    def serve(
        given: dict[str, Any], server: ServerOption = None, json_: JsonOption = False
    ) -> None:
        settings = make_settings(entry, chosen_values(entry, given))
        connection, data = connection_settings(server), local_folder(server)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        logging.getLogger("millstream.wire").setLevel(logging.WARNING)

        async def work() -> None:
            from millstream.cli.commands.foreground import notify
            from millstream.cli.stopping import stopped_by_signals
            from millstream.gateways.running import serve_gateway

            def listening(status: "GatewayStatus") -> None:
                if json_:
                    print_json(status.to_json(), line=True)
                notify("READY=1\nSTATUS=listening")

            stop = stopped_by_signals()
            await serve_gateway(entry, settings, connection, stop, listening, data=data)

        asyncio.run(work())

    serve.__doc__ = (
        f"Run a gateway for {entry.title} clients until Ctrl-C or SIGTERM: exit code 0 then.\n\n"
        f"Settings are also read from the table gateway.NAME of millstream.toml, with '_' for '-'; "
        f"NAME is {entry.name} by default. Requests in progress are answered before it ends. It "
        f"logs to stderr; with --json it prints its status when it listens. "
        f"'millstream up --{entry.name} PORT' runs a gateway with the broker."
    )
    options = OptionGroup(lambda: list(_options(entry)), dict)
    serve.__annotations__["given"] = Annotated[dict[str, Any], options]
    runs.command(entry.name)(grouped(serve))


for _entry in PROTOCOLS.values():
    _add(_entry)


@app.command("ls")
def list_(server: ServerOption = None, json_: JsonOption = False) -> None:
    """List the gateways that run, on any machine: every one is asked."""
    from millstream.cli.views import gateway as view
    from millstream.gateways.status import ask_all

    found = run(ask_all, server)
    if json_:
        print_json([view.record(status) for status in found])
    else:
        view.show_list(found)


@app.command()
def status(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Of the gateway. (default: all)")
    ] = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Show running gateways: connections, requests, CPU time by step, and the protocol's own part.

    Exit code 3 if it is not running, or none is.
    """
    from millstream.cli.views import gateway as view
    from millstream.gateways.status import ask_all, ask_status

    async def work(mill: "Mill") -> "list[GatewayStatus]":
        return await ask_all(mill) if name is None else [await ask_status(mill, name)]

    found = run(work, server)
    if json_:
        records = [view.record(status) for status in found]
        print_json(records if name is None else records[0])
    elif not found:
        say("No gateway is running.")
    for one in [] if json_ else found:
        view.show(one)
    if not found:
        raise typer.Exit(Exit.NOT_RUNNING)
