"""`millstream node`: the nodes of a local cluster, by name."""

from typing import Annotated

import typer

from millstream.cli.output import DataOption, JsonOption, print_json, print_table, say
from millstream.settings import data_folder, parse_duration

__all__ = ["app"]

app = typer.Typer(help="List, stop, kill and start single nodes.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the node.")]
TimeoutOption = Annotated[str, typer.Option(help="How long to wait.")]


@app.command("ls")
def list_(data: DataOption = None, json_: JsonOption = False) -> None:
    """List the nodes of the broker."""
    from millstream import broker

    nodes = broker.read_state(data_folder(data)).nodes
    if json_:
        print_json(nodes)
        return
    print_table(
        "Nodes",
        ["node", "state", "address", "#pid", "log"],
        [
            (
                node.name,
                "running" if node.running else "stopped",
                node.url,
                node.server_pid if node.running else None,
                node.log,
            )
            for node in nodes
        ],
    )


@app.command()
def stop(name: NameArgument, data: DataOption = None, timeout: TimeoutOption = "30s") -> None:
    """Stop one node cleanly; its leaders move to the others first."""
    from millstream import broker

    broker.stop_node(data_folder(data), name, timeout=parse_duration(timeout))
    say(f"Stopped {name}. Start it again with 'millstream node start {name}'")


@app.command()
def kill(name: NameArgument, data: DataOption = None) -> None:
    """Kill one node, as in a crash, to see how your application copes."""
    from millstream import broker

    broker.kill_node(data_folder(data), name)
    say(f"Killed {name}. Start it again with 'millstream node start {name}'")


@app.command()
def start(
    name: NameArgument,
    data: DataOption = None,
    timeout: TimeoutOption = "30s",
    json_: JsonOption = False,
) -> None:
    """Start a node that was stopped or killed.

    If the key was given in MILLSTREAM_ENCRYPTION_KEY, it must be set again.
    """
    from millstream import broker
    from millstream.cli.options.broker import encryption_of

    state = broker.start_node(
        data_folder(data),
        name,
        encryption=encryption_of(),
        timeout=parse_duration(timeout),
    )
    node = next(item for item in state.nodes if item.name == name)
    if json_:
        print_json(node)
    else:
        say(f"{name} is ready at {node.url}")
