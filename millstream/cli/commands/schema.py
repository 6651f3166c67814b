"""`millstream schema`: register and evolve the schemas of topics, and check changes in CI."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.exits import Exit
from millstream.cli.options.groups import grouped
from millstream.cli.options.schema_file import SCHEMA_HELP, SchemaFormat, load_schema
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
SchemaArgument = Annotated[str, typer.Argument(metavar="SCHEMA", help=SCHEMA_HELP)]
DropOption = Annotated[
    bool,
    typer.Option("--drop-constraints", help="Drop constraints such as patterns and minimums."),
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        help="BACKWARD, FORWARD or FULL, each also as ..._TRANSITIVE, or NONE.",
    ),
]


@dataclass(frozen=True, slots=True)
class _New:
    """How the topic holds its first schema."""

    wire_format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="Format of single events in the topic: json, avro or protobuf."
        ),
    ] = None
    create: Annotated[
        bool, typer.Option("--create", help="Create the topic if it does not exist.")
    ] = False
    guarded: Annotated[
        bool,
        typer.Option(
            "--guarded", help="Create it guarded: a guard checks everything that is published."
        ),
    ] = False


@app.command()
@grouped
def register(
    topic: TopicArgument,
    given: SchemaArgument,
    new: _New,
    form: SchemaFormat,
    mode: ModeOption = None,
    *,
    drop_constraints: DropOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Register a topic's schema or its next version; the same schema again changes nothing."""
    schema = load_schema(given, form, drop_constraints)
    if new.guarded and not new.create:
        raise ConfigError("--guarded: a topic is guarded from its creation on; add --create")

    async def work(mill: "Mill") -> "tuple[Version, TopicSchemas]":
        from millstream.errors import TopicNotFound
        from millstream.messaging import TopicSettings

        try:
            if new.guarded:
                await mill.edit_topic(topic, guarded=True)  # refused if it exists without
            version = await mill.schemas.register(topic, schema, mode, new.wire_format)
        except TopicNotFound:
            if not new.create:
                raise
            settings = TopicSettings(wire_format=new.wire_format or "json", guarded=new.guarded)
            await mill.create_topic(topic, settings, schema=schema, compatibility=mode)
            version = (await mill.schemas.topic(topic)).latest
        return version, await mill.schemas.topic(topic)

    _report(*run(work, server), json_)


@app.command()
@grouped
def evolve(
    topic: TopicArgument,
    given: SchemaArgument,
    form: SchemaFormat,
    mode: ModeOption = None,
    drop_constraints: DropOption = False,
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Register the next version of a topic's schema, if its compatibility mode allows it.

    With --mode the mode is changed first, and the version is checked under the new one.
    """
    schema = load_schema(given, form, drop_constraints)

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
    """Show a version of a topic's schema, in any format."""

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
@grouped
def check(
    given: SchemaArgument,
    form: SchemaFormat,
    topic: Annotated[
        str | None, typer.Option("--topic", "-t", metavar="TOPIC", help="Check against this topic.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCHEMA", help="Check against this schema, without a broker; oldest first."
        ),
    ] = None,
    mode: ModeOption = None,
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Check whether a schema can be the next version, without changing anything; useful in CI.

    Exit code 4 if it cannot, with every field and rule that it breaks. Without --topic and
    --against it only checks that the schema itself is valid.
    """
    if topic is not None and against:
        raise ConfigError("check against a topic or against files, not both")
    schema = load_schema(given, form)
    if topic is None:
        problems = _offline(schema, against or [], mode, form)
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
    schema: "Schema", against: list[str], mode: str | None, form: SchemaFormat
) -> "list[Problem]":
    from millstream.schemas import check as compare

    olds = [load_schema(old, form) for old in against]
    return compare(schema, olds, mode or "BACKWARD")


@app.command("mode")
def mode_(
    topic: TopicArgument,
    mode: Annotated[str, typer.Argument(metavar="MODE", help="The new compatibility mode.")],
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Change the compatibility mode of a topic's schema."""
    record = run(lambda mill: mill.schemas.set_mode(topic, mode), server)
    if json_:
        print_json(_record(record))
    else:
        say(f"Topic '{topic}' now has the compatibility mode {record.mode}")


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
            raise ConfigError("the schema was declared as a record; it has no original text")
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
