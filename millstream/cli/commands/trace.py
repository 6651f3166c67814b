"""`millstream trace`: the way of a message through servers, accounts, streams and listeners."""

from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.options.bodies import HeaderOption, body_bytes, header_pairs
from millstream.cli.output import JsonOption, print_json
from millstream.cli.session import ServerOption, run
from millstream.settings import parse_duration

if TYPE_CHECKING:
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()


@app.command()
def trace(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="Where the message goes.")],
    body: Annotated[str | None, typer.Argument(metavar="[BODY]", help="Its body.")] = None,
    deliver: Annotated[
        bool,
        typer.Option("--deliver", help="Really deliver and store it. (default: only a dry run)"),
    ] = False,
    header: HeaderOption = None,
    timeout: Annotated[str, typer.Option("--timeout", help="How long to wait.")] = "5s",
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Draw the way of a message: servers, accounts, streams, listeners and what refused it.

    A dry run: nobody receives the message and no topic stores it, unless --deliver is given.
    """
    from millstream.cli.views.trace import collect, draw

    data = b"" if body is None else body_bytes(body)
    pairs = header_pairs(header)
    seconds = parse_duration(timeout)

    async def work(mill: "Mill") -> list[dict[str, object]]:
        return await collect(mill, (subject, data, pairs), deliver, seconds)

    reports = run(work, server)
    if json_:
        print_json(reports)
    else:
        draw(subject, reports, dry=not deliver)
