"""`millstream process`: the exactly-once processes from topics to topics and tables."""

import typer

from millstream.cli.output import JsonOption, print_json
from millstream.cli.session import ServerOption, run

__all__ = ["app"]

app = typer.Typer(
    help="Processes: programs that read topics and write topics and tables, exactly once.",
    no_args_is_help=True,
)


@app.command("ls")
def list_(server: ServerOption = None, json_: JsonOption = False) -> None:
    """List the processes that have stored a position, running or not.

    The broker knows what they committed, not whether they run: see 'last commit'. One that was
    last run by an older version is listed when it has run again.
    """
    from millstream.cli.views import process as view

    found = run(lambda mill: mill.processes(), server)
    if json_:
        print_json([view.process_record(info) for info in found])
    else:
        view.show_list(found)
