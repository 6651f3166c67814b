"""Where a schema on the command line comes from: a file, or a class of the user's own code."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.schemas import Schema

__all__ = ["SOURCE_HELP", "load_schema"]

SOURCE_HELP: Final = (
    "A file (.avsc, .json, .proto, or a descriptor set .pb), or a class as module:Class."
)
_FORMATS: Final = {".avsc": "avro", ".proto": "protobuf"}


def load_schema(
    source: str, format_: str | None, message: str | None, drop_constraints: bool = False
) -> Schema:
    """The schema in a file, or of a class that can be imported from this folder."""
    from millstream.schemas import declare

    path = Path(source)
    module, colon, name = source.partition(":")
    if colon and not path.exists() and all(part.isidentifier() for part in module.split(".")):
        return declare(_class(module, name), drop_constraints=drop_constraints)
    if path.suffix in (".pb", ".desc", ".bin"):
        return declare(path.read_bytes(), message=message)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is no text ({error}); a descriptor set ends in .pb") from error
    return declare(
        text,
        format=format_ or _FORMATS.get(path.suffix),
        message=message,
        drop_constraints=drop_constraints,
    )


def _class(module: str, name: str) -> object:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"there is no {module}:{name} to import from {folder}: {error}"
        ) from error
    return found
