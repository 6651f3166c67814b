"""`millstream up` and `down`: a broker in the background, or in the foreground of a service."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.exits import Exit
from millstream.cli.options.broker import BrokerValues, LaunchOptions, broker_settings
from millstream.cli.options.groups import grouped
from millstream.cli.output import DataOption, JsonOption, print_json, say
from millstream.cli.views.broker import describe, report_gateways
from millstream.errors import ConfigError
from millstream.settings import data_folder, parse_duration

if TYPE_CHECKING:
    from millstream.broker import BrokerSettings

__all__ = ["app"]

app = typer.Typer()


@app.command()
@grouped
def up(
    given: BrokerValues, launch: LaunchOptions, data: DataOption = None, json_: JsonOption = False
) -> None:
    """Start a durable broker and return when it is ready.

    Every option is also a key of the broker table of millstream.toml, with '_' for '-'. Tenants
    with limits, users and leaf remotes are its lists accounts, users and leaf_remotes. Other
    settings of the Kafka gateway are in the table gateway.kafka. Exit code 4 if the broker runs
    and its gateway does not.
    """
    if launch.nodes < 1:
        raise ConfigError(f"--nodes must be 1 or more, not {launch.nodes}")
    if launch.nodes > 1 and given["join"]:
        raise ConfigError("--nodes runs a complete cluster here; --join is for one node of several")
    settings = _with_gateway(broker_settings(data, given))
    _check_captures(settings)
    if launch.foreground:
        from millstream.cli.commands.foreground import serve

        serve(settings, launch, as_json=json_)
    else:
        _background(settings, launch, as_json=json_)


def _check_captures(settings: "BrokerSettings") -> None:
    """Refuse settings of captures that are wrong now, not in the log of the broker."""
    if not settings.cdc:
        return
    from millstream.cdc.settings_file import load_capture

    names = [load_capture(file).name for file in settings.cdc]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--cdc: two files have a capture of the name '{name}'")


def _with_gateway(settings: "BrokerSettings") -> "BrokerSettings":
    """With the other settings of its gateway, which are refused now and not in a log."""
    if settings.kafka is None:
        return settings
    from millstream.gateways.protocols import find_protocol
    from millstream.gateways.settings_file import chosen_values, make_settings

    entry = find_protocol("kafka")
    entry.check()
    values = chosen_values(entry, {"port": settings.kafka})
    make_settings(entry, values)
    del values["port"]  # the one that it gets may be another: 0 is any free one
    return replace(settings, kafka_settings=values)


@app.command()
def down(
    data: DataOption = None,
    timeout: Annotated[str, typer.Option(help="How long to wait for a clean stop.")] = "30s",
    json_: JsonOption = False,
) -> None:
    """Stop the broker of the data folder: all its nodes and waiting standbys."""
    from millstream import broker

    stopped = broker.down(data_folder(data), timeout=parse_duration(timeout))
    if json_:
        print_json(stopped)
    else:
        names = ", ".join(
            f"{node.name} (pid {node.server_pid})" for node in stopped.nodes if node.running
        )
        say(f"Stopped {names}. The data stays in {stopped.data}")


def _background(settings: "BrokerSettings", launch: LaunchOptions, *, as_json: bool) -> None:
    from millstream import broker

    state = broker.up(
        settings,
        nodes=launch.nodes,
        standby=launch.standby,
        timeout=parse_duration(launch.timeout),
        set_aside=tuple(launch.set_aside or ()),
    )
    if as_json:
        print_json(state)
    else:
        say(describe(state))
    if not report_gateways(state):
        raise typer.Exit(Exit.UNHEALTHY)
