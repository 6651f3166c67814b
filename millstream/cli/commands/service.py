"""`millstream service`: the services that answer requests on a broker, of any NATS client."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.options.groups import grouped
from millstream.cli.output import JsonOption, print_json
from millstream.cli.session import ServerOption, run
from millstream.errors import ConfigError
from millstream.settings import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.messaging import ServiceInfo, ServiceStats
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer(help="Services: what answers requests, of any NATS client.", no_args_is_help=True)

NameArgument = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Only instances of this service.")
]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """How many answers are waited for, and how long."""

    wait: Annotated[
        str, typer.Option("--wait", help="Stop after this time without another answer.")
    ] = "300ms"
    timeout: Annotated[str, typer.Option("--timeout", help="Stop after this time anyway.")] = "5s"
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Stop after N instances.")] = (
        10_000
    )

    def limits(self) -> dict[str, Any]:
        """The same, as `mill.services` takes it."""
        quiet, timeout = parse_duration(self.wait), parse_duration(self.timeout)
        return {"limit": self.limit, "quiet": quiet, "timeout": timeout}


@app.command("ls")
@grouped
def list_(
    waiting: _Waiting,
    name: NameArgument = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """List the running instances of services, and the subjects they answer on.

    Every instance is asked; one that answers too late is not listed.
    """
    from millstream.cli.views import service as view

    limits = waiting.limits()

    async def work(mill: "Mill") -> "list[ServiceInfo]":
        return await mill.services(name, **limits)

    found = run(work, server)
    _check_found(name, found)
    if json_:
        print_json([view.record(info) for info in found])
    else:
        view.show_list(found)


@app.command()
@grouped
def stats(
    waiting: _Waiting,
    name: NameArgument = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Show what each endpoint has done since its instance started: requests, errors, times.

    Every instance is asked; one that answers too late is not shown.
    """
    from millstream.cli.views import service as view

    limits = waiting.limits()

    async def work(mill: "Mill") -> "list[ServiceStats]":
        return await mill.service_stats(name, **limits)

    found = run(work, server)
    _check_found(name, found)
    if json_:
        print_json([view.record(one) for one in found])
    else:
        view.show_stats(found)


def _check_found(name: str | None, found: "Sequence[object]") -> None:
    if name is not None and not found:
        raise ConfigError(
            f"no instance of service '{name}' answered. Check the name, or wait longer with "
            f"--timeout; 'millstream service ls' lists all services"
        )
