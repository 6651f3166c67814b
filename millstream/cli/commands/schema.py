"""`millstream schema`: give topics schemas, change them safely, and check changes in CI."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.exits import Exit
from millstream.cli.options.schema_source import SOURCE_HELP, load_schema
from millstream.cli.output import JsonOption, print_json, print_table, say
from millstream.cli.session import ServerOption, run
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.mill import Mill
    from millstream.schemas import Problem, Schema
    from millstream.schemas.registry.records import TopicSchemas, Version

__all__ = ["app"]

app = typer.Typer(
    help="Schemas of topics: register, list, show, check and evolve.", no_args_is_help=True
)

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="FORMAT", help="avro, json or protobuf, where the file does not say."
    ),
]
MessageOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="The Protobuf message that is the event.")
]
DropOption = Annotated[
    bool,
    typer.Option("--drop-constraints", help="Give up constraints such as patterns and minimums."),
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        help="BACKWARD, FORWARD or FULL, each also as ..._TRANSITIVE, or NONE.",
    ),
]


@app.command()
def register(
    topic: TopicArgument,
    source: SourceArgument,
    wire_format: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="How single events are written: json, avro, protobuf."),
    ] = None,
    mode: ModeOption = None,
    create: Annotated[
        bool, typer.Option("--create", help="Declare the topic if it is not there.")
    ] = False,
    format_: FormatOption = None,
    message: MessageOption = None,
    drop_constraints: DropOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Give a topic a schema, or its next version; the same schema again changes nothing."""
    schema = load_schema(source, format_, message, drop_constraints)

    async def work(mill: "Mill") -> "tuple[Version, TopicSchemas]":
        from millstream.errors import TopicNotFound
        from millstream.messaging import TopicSettings

        try:
            version = await mill.schemas.register(topic, schema, mode, wire_format)
        except TopicNotFound:
            if not create:
                raise
            settings = TopicSettings(wire_format=wire_format or "json")
            await mill.create_topic(topic, settings, schema=schema, compatibility=mode)
            version = (await mill.schemas.topic(topic)).latest
        return version, await mill.schemas.topic(topic)

    _report(*run(work, server), json_)


@app.command()
def evolve(
    topic: TopicArgument,
    source: SourceArgument,
    mode: ModeOption = None,
    format_: FormatOption = None,
    message: MessageOption = None,
    drop_constraints: DropOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Register the next version of a topic's schema, if its promise allows it.

    With --mode the promise is changed first, and the version is checked under the new one.
    """
    schema = load_schema(source, format_, message, drop_constraints)

    async def work(mill: "Mill") -> "tuple[Version, TopicSchemas]":
        version = await mill.schemas.evolve(topic, schema, mode)
        return version, await mill.schemas.topic(topic)

    _report(*run(work, server), json_)


def _report(version: "Version", record: "TopicSchemas", as_json: bool) -> None:
    if as_json:
        print_json({"topic": record.topic, **_version(version), **_facts(record)})
    else:
        say(
            f"Topic '{record.topic}' has version {version.version} of its schema: id {version.id}, "
            f"{record.format}, {record.mode}"
        )


@app.command("ls")
def list_(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="List the versions of this topic only.")
    ] = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """List the topics that have a schema, or the versions of one topic's schema."""

    async def work(mill: "Mill") -> "list[TopicSchemas]":
        return await mill.schemas.topics() if topic is None else [await mill.schemas.topic(topic)]

    records = run(work, server)
    if json_:
        print_json([_record(record) for record in records])
    elif topic is None:
        rows = [(r.topic, len(r.versions), r.latest.id, r.format, r.mode) for r in records]
        print_table("Schemas", ("topic", "#versions", "#latest id", "written as", "mode"), rows)
    else:
        versions = [(v.version, v.id, v.fingerprint) for v in records[0].versions]
        print_table(f"Schema of {topic}", ("#version", "#id", "fingerprint"), versions)


@app.command()
def show(
    topic: TopicArgument,
    version: Annotated[
        int | None, typer.Option(metavar="N", help="Which version. (default: the latest)")
    ] = None,
    as_: Annotated[
        str,
        typer.Option(
            "--as", metavar="FORMAT", help="avro, json, proto, spark, arrow, or origin (as given)."
        ),
    ] = "json",
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Show a version of a topic's schema in the format that is wanted."""

    async def work(mill: "Mill") -> "tuple[TopicSchemas, Version, Schema]":
        found, schema = await mill.schemas.version(topic, version)
        return await mill.schemas.topic(topic), found, schema

    record, found, schema = run(work, server)
    text = render(schema, as_)
    if json_:
        print_json({"topic": topic, **_version(found), **_facts(record), "as": as_, "schema": text})
    else:
        say(text.rstrip("\n"))


@app.command()
def check(
    source: SourceArgument,
    topic: Annotated[
        str | None, typer.Option("--topic", "-t", metavar="TOPIC", help="Check against this topic.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="Check against this, without a broker; oldest first."),
    ] = None,
    mode: ModeOption = None,
    format_: FormatOption = None,
    message: MessageOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Check whether a schema may be the next version; made for CI, nothing is changed.

    Exit code 4 when it may not, with every field and rule that it breaks. Alone, without --topic
    and --against, it checks that the schema can be declared.
    """
    if topic is not None and against:
        raise ConfigError("check against a topic or against files, not both")
    schema = load_schema(source, format_, message)
    if topic is None:
        problems = _offline(schema, against or [], mode, format_, message)
    else:
        problems = run(lambda mill: mill.schemas.check(topic, schema, mode), server)
    if json_:
        print_json({"compatible": not problems, "problems": [_problem(p) for p in problems]})
    elif not problems:
        say("compatible" if topic or against else "sound")
    else:
        for problem in problems:
            say(f"version {problem.version + 1}: {problem}")
    if problems:
        raise typer.Exit(Exit.UNHEALTHY)


def _offline(
    schema: "Schema",
    against: list[str],
    mode: str | None,
    format_: str | None,
    message: str | None,
) -> "list[Problem]":
    from millstream.schemas import check as compare

    olds = [load_schema(old, format_, message) for old in against]
    return compare(schema, olds, mode or "BACKWARD")


@app.command("mode")
def mode_(
    topic: TopicArgument,
    mode: Annotated[str, typer.Argument(metavar="MODE", help="The new promise.")],
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Change what a topic promises about the next versions of its schema."""
    record = run(lambda mill: mill.schemas.set_mode(topic, mode), server)
    if json_:
        print_json(_record(record))
    else:
        say(f"Topic '{topic}' promises {record.mode} from now on")


# -- forms --------------------------------------------------------------------------------


def render(schema: "Schema", form: str) -> str:
    """A schema as text."""
    import json

    from millstream import schemas

    if form == "avro":
        return json.dumps(schemas.to_avro(schema.record), indent=2)
    if form == "json":
        return json.dumps(schemas.to_json_schema(schema.record), indent=2)
    if form == "proto":
        return schemas.to_proto(schema.record)
    if form == "spark":
        return schemas.to_spark(schema.record)
    if form == "arrow":
        return str(schemas.to_arrow(schema.record))
    if form == "origin":
        if schema.origin is None:
            raise ConfigError("the schema was declared as a record; it has no text of its own")
        return schema.origin.text
    raise ConfigError(f"--as {form!r}: choose avro, json, proto, spark, arrow or origin")


def _version(version: "Version") -> dict[str, Any]:
    return {"version": version.version, "id": version.id, "fingerprint": version.fingerprint}


def _facts(record: "TopicSchemas") -> dict[str, Any]:
    return {"wire_format": record.format, "mode": str(record.mode)}


def _record(record: "TopicSchemas") -> dict[str, Any]:
    versions = [_version(version) for version in record.versions]
    return {"topic": record.topic, **_facts(record), "versions": versions}


def _problem(problem: "Problem") -> dict[str, Any]:
    return {
        "field": problem.field,
        "rule": problem.rule,
        "direction": problem.direction,
        "version": problem.version + 1,
        "message": problem.message,
    }
