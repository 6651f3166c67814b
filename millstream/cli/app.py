"""The commands, put together. Rooms are loaded by the commands that need them, when they run.

Modules with commands do without `from __future__ import annotations`: typer would compile the text
of every option's annotation again at every start, a tenth of the time a command needs to answer.
"""

from __future__ import annotations

from typing import Annotated

import typer

from millstream.cli import context, doctor, logs, node, status, up
from millstream.cli.exits import EXIT_CODES

__all__ = ["app"]

app = typer.Typer(
    name="millstream",
    help="Event streaming for Python: durable messaging in front, Spark pipelines behind.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(up.app)
app.add_typer(status.app)
app.add_typer(logs.app)
app.add_typer(doctor.app)
app.add_typer(context.app)
app.add_typer(node.app, name="node")


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
    """Event streaming for Python: durable messaging in front, Spark pipelines behind.

    What is set where: an option, then the environment, then the nearest millstream.toml.
    """
    if ctx.invoked_subcommand == "up":
        ctx.default_map = {"up": up.project_defaults()}
