"""A schema on the command line: a file, or a class of the user's own code."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.schemas import Schema

__all__ = ["SCHEMA_HELP", "SchemaFormat", "load_class", "load_schema"]

SCHEMA_HELP: Final = (
    "A file (.avsc, .json, .proto, or a descriptor set .pb), or a class as module:Class."
)
_FORMATS: Final = {".avsc": "avro", ".proto": "protobuf"}


@dataclass(frozen=True, slots=True)
class SchemaFormat:
    """How the file of a schema is read."""

    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="avro, json or protobuf. (default: from the name of the file)",
        ),
    ] = None
    message: Annotated[
        str | None, typer.Option(metavar="NAME", help="The Protobuf message that is the event.")
    ] = None


def load_schema(given: str, form: SchemaFormat, drop_constraints: bool = False) -> "Schema":
    """The schema in a file, or of a class that can be imported from this folder."""
    from millstream.schemas import declare

    path = Path(given)
    module, colon, _ = given.partition(":")
    if colon and not path.exists() and all(part.isidentifier() for part in module.split(".")):
        return declare(load_class(given), drop_constraints=drop_constraints)
    if path.suffix in (".pb", ".desc", ".bin"):
        return declare(path.read_bytes(), message=form.message)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{given} is not text ({error}); a descriptor set ends in .pb") from error
    return declare(
        text,
        format=form.format_ or _FORMATS.get(path.suffix),
        message=form.message,
        drop_constraints=drop_constraints,
    )


def load_class(given: str) -> object:
    """What `module:Class` names, which can be imported from this folder."""
    module, colon, name = given.partition(":")
    if not (colon and module and name):
        raise ConfigError(f"{given!r:.80} is not a class: write it like module:Class")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # also whatever the module itself raises
        raise ConfigError(
            f"there is no {module}:{name} to import from {folder}: {error}"
        ) from error
    return found
