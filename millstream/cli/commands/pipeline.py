"""`millstream pipeline`: create, run, watch and reset pipelines of Spark queries."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.exits import Exit
from millstream.cli.output import JsonOption, print_json, say, size
from millstream.cli.session import (
    ServerOption,
    YesOption,
    chosen_context,
    confirm,
    connection_settings,
)
from millstream.errors import ConfigError
from millstream.settings import (
    export_environment,
    names_a_broker,
    parse_duration,
    parse_size,
    project_url,
)

if TYPE_CHECKING:
    from millstream.pipelines import Project

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help="Run folders of Spark code continuously: topics and tables in, topics, tables, files out.",
)

# What `ls` shows of a flow that ran; `status` has the rest.
LISTED = (
    "rows_in",
    "rows_out",
    "rows_in_per_second",
    "rows_out_per_second",
    "lag_events",
    "lag_seconds",
    "last_error",
)

FolderArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FOLDER]", help="The project. (default: the nearest millstream.toml from here)"
    ),
]
MasterOption = Annotated[
    str | None,
    typer.Option(
        help="Spark master: local[N] or spark://host:port. (default: [pipeline] master, or all "
        "cores of this machine)"
    ),
]


def _open(folder: Path | None) -> "Project":
    from millstream.pipelines import open_project

    return open_project(folder)


def _enter(ctx: typer.Context, folder: Path | None) -> "Project":
    """Open a project whose code is run; the command's end stops a session that it started.

    Called before modules that need PySpark are imported: it says if there is none.
    """
    from millstream.pipelines.project import entered_project

    return ctx.with_resource(entered_project(folder))


def _broker_options(project: "Project", server: str | None) -> dict[str, str]:
    """Where the broker is, for Spark; on the broker of this folder a pipeline runs as its admin.

    The login goes into the environment, which Spark's processes inherit: options are shown in
    Spark's pages and logs.
    """
    from millstream.pipelines.launch import broker_options

    context = chosen_context()
    if not names_a_broker(server, context) and project_url() is not None:
        own = connection_settings(None)
        if own.user is not None and own.password is not None:
            export_environment(NATS_USER=own.user, NATS_PASSWORD=own.password.reveal())
    return broker_options(project, server, context)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The new project.")],
    json_: JsonOption = False,
) -> None:
    """Create a project: millstream.toml and a file with a first pipeline to change."""
    from millstream.pipelines.template import write_template

    written = write_template(folder)
    if json_:
        print_json({"folder": folder.resolve(), "files": written})
        return
    say(f"Wrote {', '.join(path.name for path in written)} in {folder}.")
    say(f"Run it with: millstream pipeline run {folder}")


@app.command()
def run(
    ctx: typer.Context,
    folder: FolderArgument = None,
    once: Annotated[
        bool, typer.Option("--once", help="Catch up with what is stored now, then stop.")
    ] = False,
    *,
    master: MasterOption = None,
    server: ServerOption = None,
    stop_within: Annotated[
        str, typer.Option(help="How long to wait for running batches when it stops.")
    ] = "60s",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing while it runs.")] = (
        False
    ),
    json_: JsonOption = False,
) -> None:
    """Run a pipeline until Ctrl-C or SIGTERM, which stop it between two batches.

    A flow that fails is restarted after a growing pause while the others continue. Exit code 1 if a
    flow failed permanently. With --json the status is printed once a second, one object per line.
    """
    project = _enter(ctx, folder)
    from millstream.cli.views.pipeline import shown_live
    from millstream.pipelines.launch import make_runner
    from millstream.pipelines.runner import RunSettings, stopped_by_signals
    from millstream.pipelines.state_folder import StateFolder

    options = _broker_options(project, server)
    settings = RunSettings(once=once, stop_seconds=parse_duration(stop_within), options=options)
    with StateFolder(project).running():  # before a session is started for nothing
        runner = make_runner(project, settings, master)
        with shown_live(quiet=quiet, as_json=json_) as shown, stopped_by_signals(runner):
            runner.run(shown)


@app.command()
def ls(ctx: typer.Context, folder: FolderArgument = None, json_: JsonOption = False) -> None:
    """List the flows of a project: what they write, and their state.

    Unlike `status` it also lists flows that never ran.
    """
    from millstream.cli.views.pipeline import print_flows
    from millstream.pipelines.loader import load
    from millstream.pipelines.state_folder import StateFolder

    project = _enter(ctx, folder)
    pipeline = load(project)
    state = StateFolder(project)
    status = state.read_status() or {"flows": []}
    known = {flow["name"]: flow for flow in status["flows"]}
    running = state.pid() is not None
    rows = [
        {
            "flow": flow.name,
            "to": flow.target,
            "kind": pipeline.outputs[flow.target].kind,
            "mode": flow.mode,
            "declared": flow.where,
            **{name: known.get(flow.name, {}).get(name) for name in LISTED},
            "state": _state(known.get(flow.name), running),
        }
        for flow in pipeline.flows.values()
    ]
    if json_:
        print_json({"pipeline": project.name, "running": running, "flows": rows})
    else:
        print_flows(project.name, running, rows)


def _state(flow: dict[str, Any] | None, running: bool) -> str:
    """The state of a flow; if the pipeline is not running, neither is the flow."""
    state = "new" if flow is None else str(flow["state"])
    return "stopped" if not running and state in ("running", "waiting", "restarting") else state


@app.command()
def status(folder: FolderArgument = None, json_: JsonOption = False) -> None:
    """Show rates, lag, watermark, state and last error of every flow.

    Exit code 4 if a flow failed permanently or is being restarted, or if the process that ran the
    pipeline died.
    """
    from millstream.cli.views.pipeline import print_status
    from millstream.pipelines.state_folder import StateFolder

    project = _open(folder)
    state = StateFolder(project)
    never: dict[str, Any] = {"state": "never run", "flows": []}
    found = state.read_status() or never
    pid = state.pid()
    if pid is None and found["state"] == "running":
        found = state.read_status() or never  # it may just have stopped and recorded that
        if found["state"] == "running":
            found["state"] = "gone"
    if pid is not None and found is never:
        found["state"] = "starting"
    found = {"pipeline": project.name, **found, "pid": pid}
    if json_:
        print_json(found)
    else:
        print_status(found)
    troubled = any(flow["state"] in ("failed", "restarting") for flow in found["flows"])
    if troubled or found["state"] == "gone":
        raise typer.Exit(Exit.UNHEALTHY)


@app.command()
def stop(
    folder: FolderArgument = None,
    timeout: Annotated[str, typer.Option(help="How long to wait until it has stopped.")] = "90s",
    json_: JsonOption = False,
) -> None:
    """Stop a running pipeline between two batches, and wait until it has."""
    from millstream.pipelines.state_folder import StateFolder

    project = _open(folder)
    ended = StateFolder(project).stop(parse_duration(timeout))
    if json_:
        print_json({"pipeline": project.name, "stopped": ended})
    elif ended:
        say(f"The pipeline '{project.name}' has stopped.")
    if not ended:
        if not json_:
            say(f"It was asked to stop and has not ended within {timeout}; see its status.")
        raise typer.Exit(Exit.ERROR)


@app.command()
def reset(
    ctx: typer.Context,
    folder: FolderArgument = None,
    flow: Annotated[
        list[str] | None,
        typer.Option("--flow", metavar="NAME", help="Only this flow; repeat it for more."),
    ] = None,
    empty_outputs: Annotated[
        bool,
        typer.Option(
            "--empty-outputs", help="Also remove what the flows wrote to topics, tables and files."
        ),
    ] = False,
    *,
    server: ServerOption = None,
    yes: YesOption = False,
    json_: JsonOption = False,
) -> None:
    """Reset flows: at the next run they start from scratch and write all results again.

    Refused while the pipeline is running. Old checkpoints are kept next to the new ones.
    """
    project = _enter(ctx, folder)
    from millstream.pipelines.loader import load
    from millstream.pipelines.outputs import PipelineTopics
    from millstream.pipelines.reset import chosen_flows, reset_flows

    pipeline = load(project)
    names = chosen_flows(pipeline, flow or [])
    outputs = sorted({pipeline.flows[name].target for name in names})
    foreign = {name for name in outputs if pipeline.outputs[name].kind in ("sink", "postgres")}
    emptying = [name for name in outputs if empty_outputs and name not in foreign]
    twice = [name for name in outputs if name not in emptying]
    text = f"Reset {', '.join(names)} of '{project.name}': they will read everything again."
    if emptying:
        text += f" The contents of {', '.join(emptying)} are removed."
    if twice:
        text += f" Their results are written to {', '.join(twice)} a second time."
    confirm(text, yes)
    with PipelineTopics(_broker_options(project, server)) as topics:
        chosen = topics if empty_outputs else None
        moved, emptied = reset_flows(project, pipeline, names, topics=chosen)
    if json_:
        print_json({"flows": names, "checkpoints": moved, "emptied": emptied})
        return
    kept = f"; old checkpoints are in {moved[0].parent}" if moved else "; there were no checkpoints"
    say(f"Reset {', '.join(names)}{kept}.")
    if emptied:
        say(f"Emptied {', '.join(emptied)}.")


@app.command()
def graph(
    ctx: typer.Context,
    folder: FolderArgument = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it into an SVG file.")
    ] = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Show which flow reads what. The functions are called; nothing is written."""
    target = None if svg is None else svg.absolute()
    project = _enter(ctx, folder)
    from millstream.pipelines.graph import to_svg, to_text
    from millstream.pipelines.launch import graph_of

    found = graph_of(project, _broker_options(project, server))
    if target is not None:
        target.write_text(to_svg(found, project.name), encoding="utf-8")
    if json_:
        print_json(found.as_dict())
    else:
        say(to_text(found))
        if target is not None:
            say(f"Drawn into {target}.")


@app.command()
def package(
    ctx: typer.Context,
    folder: FolderArgument = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write it to.")
    ] = Path("dist"),
    json_: JsonOption = False,
) -> None:
    """Pack a project for spark-submit: main.py, and a zip with the project and Millstream."""
    from millstream.pipelines.loader import load
    from millstream.pipelines.shipping import package as pack

    target = output.absolute()
    project = _enter(ctx, folder)
    load(project)  # if it does not load here, it would not load there either
    main, archive = pack(project, target)
    command = f"spark-submit --py-files {archive} {main}"
    if json_:
        print_json({"files": [main, archive], "command": command})
    else:
        say(f"Wrote {main} and {archive}.")
        say(f"Run it with: {command}")


@app.command()
def prepare(json_: JsonOption = False) -> None:
    """Prepare this installation of Spark, so that pipelines start in half the time.

    Runs a small pipeline on a temporary broker and keeps Java's classes in the cache folder: half a
    minute, once, 200 MB. Useful in images, and before the first run.
    """
    from millstream.cli.views.pipeline import working
    from millstream.pipelines.preparation import prepare_spark

    with working("Running a small pipeline, to keep the classes that Java loads", quiet=json_):
        archive = prepare_spark()
    bytes_ = archive.stat().st_size
    if json_:
        print_json({"file": archive, "bytes": bytes_})
    else:
        say(f"Spark is prepared: wrote {archive} ({size(bytes_)}).")


@app.command()
def compact(
    files: Annotated[Path, typer.Argument(metavar="FILES", help="A folder of Parquet files.")],
    size: Annotated[str, typer.Option(help="Approximate size of the new files.")] = "128MiB",
    json_: JsonOption = False,
) -> None:
    """Merge the small Parquet files that a pipeline wrote into larger ones.

    Rows stay the same, and so does the pipeline's record of which rows it wrote. Not while the
    pipeline that writes the folder is running.
    """
    from millstream.pipelines.compact import compact_folder

    if not files.is_dir():
        raise ConfigError(f"there is no folder {files}")
    done = compact_folder(files, parse_size(size))
    if json_:
        print_json(done)
    else:
        say(
            f"{files}: {done.files_before:,} files became {done.files_after:,}, "
            f"{done.rows:,} rows, {done.bytes_before:,} bytes became {done.bytes_after:,}."
        )
