"""Writes the reference of docs/CLI.md from the commands: python -m tools.command_reference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from millstream.cli.app import app

__all__ = ["PAGE", "main", "with_reference"]

PAGE = Path(__file__).parents[1] / "docs" / "CLI.md"
BEGIN = "<!-- reference: written by python -m tools.command_reference -->\n"
END = "<!-- end of reference -->\n"


def main() -> None:
    """Bring the page up to date."""
    PAGE.write_text(with_reference(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_reference(page: str) -> str:
    """The page with its reference as the commands are now."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE} has no lines {BEGIN!r} and {END!r}")
    return before + BEGIN + "\n" + "\n".join(_reference()) + "\n" + END + after


def _reference() -> Iterator[str]:
    root: Any = typer.main.get_command(app)
    context = root.make_context("millstream", [], resilient_parsing=True)
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        if hasattr(command, "commands"):
            yield f"### millstream {name}\n\n{_line(command)}\n"
            for part in command.commands.values():
                yield from _command(f"{name} {part.name}", part)
        else:
            yield from _command(name, command)


def _command(name: str, command: Any) -> Iterator[str]:
    level = "####" if " " in name else "###"
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    usage = " ".join(["millstream", name, *(_argument(param) for param in arguments)])
    yield f"{level} {usage}\n\n{_line(command)}\n"
    options = [param for param in command.params if param not in arguments]
    rows = [(_names(param), _text(param.help)) for param in options if param.name != "help"]
    if rows:
        yield "| option | |\n| --- | --- |"
        yield from (f"| {names} | {text} |" for names, text in rows)
        yield ""


def _argument(param: Any) -> str:
    shown = str(param.metavar or param.name.upper())
    return shown if param.required or shown.startswith("[") else f"[{shown}]"


def _names(param: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts])


def _line(command: Any) -> str:
    """The first sentence of the help."""
    return _text((command.help or "").partition("\n\n")[0])


def _text(text: str | None) -> str:
    flat = re.sub(r"\s+", " ", text or "").strip()
    return flat.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
