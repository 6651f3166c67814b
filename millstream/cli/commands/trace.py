"""`millstream trace`: the path of a message through servers, accounts and streams."""

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
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="Subject of the message.")],
    body: Annotated[str | None, typer.Argument(metavar="[BODY]", help="Body of it.")] = None,
    *,
    deliver: Annotated[
        bool,
        typer.Option("--deliver", help="Really deliver and store it. (default: only a dry run)"),
    ] = False,
    header: HeaderOption = None,
    timeout: Annotated[str, typer.Option("--timeout", help="How long to wait.")] = "5s",
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Trace the path of a message: servers, accounts, streams, subscribers and refusals.

    A dry run: the message is neither delivered nor stored, except with --deliver.
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
