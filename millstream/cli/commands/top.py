"""`millstream top`: rates and lag of topics and subscriptions, live."""

from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.output import JsonOption
from millstream.cli.session import ServerOption, run
from millstream.errors import ConfigError
from millstream.settings import parse_duration

if TYPE_CHECKING:
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()


@app.command()
def top(
    topic: Annotated[
        list[str] | None, typer.Argument(metavar="[TOPIC]...", help="Only these topics.")
    ] = None,
    interval: Annotated[
        str, typer.Option("--interval", "-i", help="Time between updates, such as 2s.")
    ] = "1s",
    count: Annotated[
        int | None, typer.Option("--count", "-c", min=1, help="Stop after N updates.")
    ] = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Show lag and rates of subscriptions and topics until 'q' or Ctrl-C.

    The largest lags and the busiest topics are shown, as many as fit on the screen. Rates count
    messages; a pack of many events is one. With --json one object per line, with all of them.
    """
    from millstream.cli.views.top import watch

    seconds = parse_duration(interval)
    if seconds < 0.1:
        raise ConfigError(f"--interval {interval}: the minimum is 100ms")

    async def work(mill: "Mill") -> None:
        await watch(mill, topic or [], seconds, count, as_json=json_)

    run(work, server)
