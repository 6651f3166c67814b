"""What a declaration of a setting says besides its name, type and default.

A setting is declared once, beside the field of the class that holds it. The option of the command
line, the key of millstream.toml, the environment variable and the row in the documentation are
derived from that declaration, so a new setting appears in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Declaration", "Form"]


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
    ORIGIN = "origin"  # a topic to copy from
    ORIGINS = "origins"  # several; the option is repeated


@dataclass(frozen=True, slots=True)
class Declaration:
    """Everything about one setting that is not checked by its class."""

    help: str
    form: Form = Form.TEXT
    group: str = ""  # heading in the help; "" for the general options
    flags: tuple[str, ...] = ()  # of the option; () for --name-of-the-field
    metavar: str = ""  # "" for that of the form
    env: str = ""  # environment variable
