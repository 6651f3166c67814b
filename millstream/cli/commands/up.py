"""`millstream up` and `down`: a broker in the background, or in the foreground of a service."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.options import broker as options
from millstream.cli.output import DataOption, JsonOption, print_json, say
from millstream.errors import ConfigError
from millstream.settings import data_folder, find_project_file, parse_duration

if TYPE_CHECKING:
    from millstream.broker import BrokerSettings, State

__all__ = ["app", "describe", "project_defaults", "settable_options"]

app = typer.Typer()

CLUSTER = "Cluster"
SECURITY = "Security"
LIMITS = "Limits and server"

# Options of `up` that a project file cannot set: they are about this one call.
_THIS_CALL_ONLY = {"data", "json_", "foreground", "help"}


@app.command()
def up(
    data: DataOption = None,
    host: Annotated[
        str, typer.Option(envvar="MILLSTREAM_HOST", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="MILLSTREAM_PORT", help="Port for clients; 0: any free one.")
    ] = 4222,
    monitor_port: Annotated[
        int,
        typer.Option(
            envvar="MILLSTREAM_MONITOR_PORT",
            help="Port of the monitoring page, on loopback; 0: any free one.",
        ),
    ] = 0,
    name: Annotated[str, typer.Option(help="Name shown to clients.")] = "millstream",
    durability: Annotated[
        str,
        typer.Option(
            envvar="MILLSTREAM_DURABILITY",
            help="When an event counts as stored: fsync (on disk before the ack), periodic (on "
            "disk within --sync-interval), memory (gone when the broker stops).",
        ),
    ] = "fsync",
    sync_interval: Annotated[
        str, typer.Option(help="How often 'periodic' goes to disk, such as 5s.")
    ] = "5s",
    standby: Annotated[
        bool,
        typer.Option("--standby", help="Wait while another broker owns the folder; take over."),
    ] = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", "-f", help="Stay in the foreground until stopped.")
    ] = False,
    timeout: Annotated[str, typer.Option(help="How long to wait until it is ready.")] = "30s",
    json_: JsonOption = False,
    nodes: Annotated[
        int,
        typer.Option(
            envvar="MILLSTREAM_NODES", help="A cluster of N nodes here.", rich_help_panel=CLUSTER
        ),
    ] = 1,
    join: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Cluster address of a node on another machine; give it once for each.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    node_name: Annotated[
        str | None,
        typer.Option(
            envvar="MILLSTREAM_NODE_NAME",
            help="Name of this node, the same at every start.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    cluster_host: Annotated[
        str | None,
        typer.Option(
            help="Address for the other nodes. (default: --host)", rich_help_panel=CLUSTER
        ),
    ] = None,
    cluster_port: Annotated[
        int, typer.Option(help="Port for the other nodes.", rich_help_panel=CLUSTER)
    ] = 6222,
    cluster_secret_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the secret all nodes share. (env: MILLSTREAM_CLUSTER_SECRET, itself)",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    cluster_tls: Annotated[
        bool,
        typer.Option(
            "--cluster-tls", help="TLS between nodes, same files.", rich_help_panel=CLUSTER
        ),
    ] = False,
    auth: Annotated[
        bool,
        typer.Option(
            "--auth",
            envvar="MILLSTREAM_AUTH",
            help="Make users admin, app and reader; needed on any address but loopback.",
            rich_help_panel=SECURITY,
        ),
    ] = False,
    account: Annotated[
        list[str] | None,
        typer.Option(
            help="A tenant that sees nothing of the others; repeat for more.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    encrypt: Annotated[
        bool,
        typer.Option(
            "--encrypt",
            envvar="MILLSTREAM_ENCRYPT",
            help="Encrypt the data; a key is made (0600) in the data folder if none is given.",
            rich_help_panel=SECURITY,
        ),
    ] = False,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the encryption key. (env: MILLSTREAM_ENCRYPTION_KEY, the key itself)",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    previous_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the key to rotate away from.", rich_help_panel=SECURITY),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate file.", rich_help_panel=SECURITY)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Private key file.", rich_help_panel=SECURITY)
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(help="File of authorities that sign clients.", rich_help_panel=SECURITY),
    ] = None,
    tls_verify: Annotated[
        bool,
        typer.Option("--tls-verify", help="Clients need a certificate.", rich_help_panel=SECURITY),
    ] = False,
    tls_first: Annotated[
        bool,
        typer.Option("--tls-first", help="TLS before the greeting.", rich_help_panel=SECURITY),
    ] = False,
    max_payload: Annotated[
        str | None,
        typer.Option(help="Largest message. (default: 8MiB)", rich_help_panel=LIMITS),
    ] = None,
    max_file_store: Annotated[
        str | None,
        typer.Option(
            help="Disk for all streams. (default: below the free disk)", rich_help_panel=LIMITS
        ),
    ] = None,
    max_memory_store: Annotated[
        str | None,
        typer.Option(
            help="Memory for memory streams. (default: a quarter of the RAM)",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option(help="Clients at a time.", rich_help_panel=LIMITS)
    ] = None,
    domain: Annotated[
        str | None, typer.Option(help="JetStream domain, for leaf nodes.", rich_help_panel=LIMITS)
    ] = None,
    leaf_port: Annotated[
        int | None,
        typer.Option(help="Listen for leaf nodes; 0: any free port.", rich_help_panel=LIMITS),
    ] = None,
    leaf_host: Annotated[
        str, typer.Option(help="Address for leaf nodes.", rich_help_panel=LIMITS)
    ] = "127.0.0.1",
    config: Annotated[
        Path | None,
        typer.Option(help="File of raw server configuration to append.", rich_help_panel=LIMITS),
    ] = None,
) -> None:
    """Start a durable broker and return when it is ready.

    Every option can also stand in the broker table of millstream.toml, with '_' for '-'. Tenants
    with limits, users and leaf remotes are its lists accounts, users and leaf_remotes.
    """
    from millstream.broker import BrokerSettings, Durability

    if nodes < 1:
        raise ConfigError(f"--nodes must be 1 or more, not {nodes}")
    if nodes > 1 and join:
        raise ConfigError("--nodes runs a whole cluster here; --join is for one node of several")
    if durability not in set(Durability):
        raise ConfigError(f"--durability is one of {', '.join(Durability)}, not {durability!r}")
    tls = options.tls_of(tls_cert, tls_key, tls_ca, tls_verify, tls_first)
    settings = BrokerSettings(
        data=data_folder(data),
        host=host,
        port=port,
        monitor_port=monitor_port,
        name=name,
        durability=Durability(durability),
        sync_interval=parse_duration(sync_interval),
        limits=options.limits_of(max_payload, max_file_store, max_memory_store, max_connections),
        encryption=options.encryption_of(encrypt, key_file, previous_key_file),
        auth=auth,
        users=options.users_of(),
        accounts=options.accounts_of(account or []),
        tls=tls,
        cluster=options.cluster_of(
            node_name,
            join or [],
            cluster_secret_file,
            cluster_host or host,
            cluster_port,
            tls if cluster_tls else None,
        ),
        leaf=options.leaf_of(leaf_port, leaf_host),
        domain=domain,
        raw=_read_config(config),
    )
    seconds = parse_duration(timeout)
    if foreground:
        from millstream.cli.commands.foreground import run

        run(settings, nodes=nodes, standby=standby, timeout=seconds, as_json=json_)
    else:
        _background(settings, nodes=nodes, standby=standby, timeout=seconds, as_json=json_)


@app.command()
def down(
    data: DataOption = None,
    timeout: Annotated[str, typer.Option(help="How long to wait for a gentle stop.")] = "30s",
    json_: JsonOption = False,
) -> None:
    """Stop the broker of the data folder, all its nodes and waiting standbys."""
    from millstream import broker

    stopped = broker.down(data_folder(data), timeout=parse_duration(timeout))
    if json_:
        print_json(stopped)
    else:
        names = ", ".join(
            f"{node.name} (pid {node.server_pid})" for node in stopped.nodes if node.running
        )
        say(f"Stopped {names}. The data stays in {stopped.data}")


def project_defaults() -> dict[str, Any]:
    """The options of `up` that the project file sets."""
    if find_project_file() is None:
        return {}
    defaults = options.broker_defaults({**settable_options(), "data": True})
    defaults.pop("data", None)  # data_folder() reads it, for every command alike
    return defaults


def settable_options() -> dict[str, bool]:
    """Options of `up` that a project file may set, and whether each is a path."""
    command = typer.main.get_command(app)
    parameters = command.commands["up"].params  # type: ignore[attr-defined]
    return {
        str(item.name): item.name.endswith(("_file", "_cert", "_key", "_ca", "config"))
        for item in parameters
        if item.name not in _THIS_CALL_ONLY
    }


def describe(state: "State") -> str:
    """What runs, in a few lines for people."""
    if state.standby:
        waiting = ", ".join(map(str, state.standby))
        return (
            f"{state.data} belongs to the broker at {state.url} (pid {state.pid}). "
            f"Standing by to take over when it is gone (pid {waiting})."
        )
    what = "Broker" if len(state.nodes) == 1 else f"Cluster of {len(state.nodes)} nodes"
    guards = [state.durability, *(["users"] if state.secured else []), *(["TLS"] * state.tls)]
    return (
        f"{what} ready at {state.url} ({', '.join(guards)}), data in {state.data}\n"
        f"Stop it with 'millstream down', look at it with 'millstream status'."
    )


def _background(
    settings: "BrokerSettings", *, nodes: int, standby: bool, timeout: float, as_json: bool
) -> None:
    from millstream import broker

    state = broker.up(settings, nodes=nodes, standby=standby, timeout=timeout)
    if as_json:
        print_json(state)
    else:
        say(describe(state))


def _read_config(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the server configuration {file}: {error}") from error
