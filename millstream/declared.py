"""What a declaration of a setting says besides its name, type and default.

A setting is declared once, beside the field of the class that holds it. The option of the command
line, the key of millstream.toml, the environment variable and the row in the documentation are
derived from that declaration, so a new setting appears in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, TypeVar

__all__ = [
    "Declaration",
    "Form",
    "declaration_of",
    "declared",
    "declared_fields",
    "declares",
    "default_text",
]

T = TypeVar("T")

_KEY: Final = "declaration"
_UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


class Form(StrEnum):
    """How a value is written on the command line and in millstream.toml."""

    TEXT = "text"
    TEXTS = "texts"  # a list; the option is repeated
    PAIRS = "pairs"  # NAME=TEXT; the option is repeated
    NUMBER = "number"
    SIZE = "size"  # 10GiB
    DURATION = "duration"  # 7d
    CHOICE = "choice"
    SWITCH = "switch"
    FILE = "file"  # a path; in millstream.toml relative to that file
    FILES = "files"  # several; the option is repeated
    SECRET = "secret"  # the path of a file with a secret; the variable holds the secret itself
    TABLES = "tables"  # a list of tables in millstream.toml; there is no option
    ORIGIN = "origin"  # a topic to copy from
    ORIGINS = "origins"  # several; the option is repeated


@dataclass(frozen=True, slots=True)
class Declaration:
    """Everything about one setting besides its name, type, default and checks."""

    help: str
    form: Form = Form.TEXT
    group: str = ""  # heading in the help; "" for the general options
    flags: tuple[str, ...] = ()  # of the option; () for --name
    metavar: str = ""  # "" for that of the form
    name: str = ""  # of the option and in millstream.toml, if it is not that of the field
    env: str = ""  # environment variable
    default: Any = None  # of the option, if it is not that of the field
    default_text: str = ""  # what happens by default, if the default itself does not say it


def declared(default: T, declaration: Declaration, *, repr: bool = True) -> T:
    """A field of a dataclass, with its default, that is a declared setting.

    What is returned is a `dataclasses.field`, which is typed as the default it stands for.
    """
    return field(default=default, metadata=declares(declaration), repr=repr)


def declares(declaration: Declaration) -> dict[str, Declaration]:
    """The metadata of a field without a default that is a declared setting."""
    return {_KEY: declaration}


def declaration_of(item: Field[Any]) -> Declaration | None:
    """The declaration of a field, if it has one."""
    found: Declaration | None = item.metadata.get(_KEY)
    return found


def declared_fields(cls: Any) -> Iterator[tuple[Field[Any], Declaration]]:
    """The fields of a dataclass that are declared settings."""
    for item in fields(cls):
        declaration = declaration_of(item)
        if declaration is not None:
            yield item, declaration


def default_text(declaration: Declaration, default: Any = None) -> str:
    """What holds when a setting is not given, as a person writes it; "" if it is just absent."""
    value = default if declaration.default is None else declaration.default
    if declaration.default_text:
        return declaration.default_text
    if value is MISSING or value is False or (not value and value != 0):
        return ""
    if declaration.form is Form.SIZE:
        return next((f"{value // size}{unit}" for unit, size in _UNITS if value % size == 0), "")
    return f"{value:g}s" if isinstance(value, float) else str(value)
