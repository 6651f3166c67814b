"""All commands. The module of a command, and the rooms it needs, are loaded when it is called.

A module has an `app`: with one command, with several, or (`node`) a group of commands.
Such modules do not postpone annotations (PEP 563): typer would compile the text of every option's
annotation again at every start, a tenth of the time a command needs to answer.
"""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from millstream.cli.exits import EXIT_CODES

__all__ = ["COMMANDS", "app"]

# Command or group of commands -> the module that has it, in the order of the help.
COMMANDS = {
    "up": "up",
    "down": "up",
    "status": "status",
    "logs": "logs",
    "doctor": "doctor",
    "env": "context",
    "context": "context",
    "node": "node",
    "user": "user",
    "pub": "pub",
    "sub": "sub",
    "request": "request",
    "reply": "request",
    "service": "service",
    "topic": "topic",
    "table": "table",
    "store": "store",
    "subscription": "subscription",
    "group": "group",
    "dlq": "dlq",
    "push": "push",
    "schedule": "schedule",
    "process": "process",
    "schema": "schema",
    "guard": "guard",
    "import": "import_",
    "export": "export",
    "verify": "verify",
    "backup": "backup",
    "restore": "backup",
    "cdc": "cdc",
    "gateway": "gateway",
    "pipeline": "pipeline",
    "trace": "trace",
    "top": "top",
}
ALIASES = {"subs": "subscription"}


class _OnDemand(TyperGroup):
    """Loads only the module of the called command; the help and a wrong name load all."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            self.commands[cmd_name] = _load(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        if args and args[0] not in COMMANDS and args[0] not in ALIASES:
            for name in COMMANDS:  # so that a similar name can be suggested
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)


def _load(name: str) -> Any:
    """The command of that name: one of its module's, or the module's commands as a group."""
    from millstream.cli.session import add_context_option

    module = import_module(f"millstream.cli.commands.{COMMANDS[name]}")
    holder = typer.Typer()
    holder.add_typer(module.app)
    found = typer.main.get_group(holder).commands
    if name not in found:
        holder.add_typer(module.app, name=name)
        found = typer.main.get_group(holder).commands
    add_context_option(found[name])
    return found[name]


app = typer.Typer(
    name="millstream",
    cls=_OnDemand,
    help="Event streaming for Python: durable messaging and Spark pipelines.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from millstream import __version__

        typer.echo(f"millstream {__version__}")
        raise typer.Exit


@app.callback()
def _settings(
    ctx: typer.Context,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Event streaming for Python: durable messaging and Spark pipelines.

    A setting comes from its option, else from the environment, else from the nearest
    millstream.toml.
    """
    if ctx.invoked_subcommand == "up":
        from millstream.cli.options.broker import project_defaults

        ctx.default_map = {"up": project_defaults()}
