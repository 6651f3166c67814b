"""Writes the generated parts of CLI.md and OPERATIONS.md: python -m tools.command_reference.

They come from the commands and from the declared settings, and a test fails when a page is stale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from millstream.cli.app import app
from millstream.cli.options.broker import BROKER_OPTIONS, LaunchOptions, settable_options
from millstream.cli.options.topic import flag
from millstream.declared import Form, declared_fields, default_text
from millstream.messaging.topics.setting_forms import OneWay, Setting
from millstream.messaging.topics.settings import TOPIC_SETTINGS

__all__ = ["PAGES", "main", "with_generated_parts"]

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    """Bring the pages up to date."""
    for page in PAGES:
        page.write_text(with_generated_parts(page), encoding="utf-8")


def with_generated_parts(page: Path) -> str:
    """The text of the page, with its generated parts as they have to be now."""
    text = page.read_text(encoding="utf-8")
    for name, lines in PAGES[page].items():
        start = f"<!-- {name}: written by python -m tools.command_reference -->\n"
        end = f"<!-- end of {name} -->\n"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{page} has no lines {start!r} and {end!r}")
        text = before + start + "\n" + "\n".join(lines()) + "\n" + end + after
    return text


# -- topic settings -----------------------------------------------------------------------


def _topic_settings() -> Iterator[str]:
    yield "| setting | option | default | change later | |\n| --- | --- | --- | --- | --- |"
    for name, item in TOPIC_SETTINGS.items():
        option = f"`{item.set_by}`" if item.set_by else f"`{flag(item)}`"
        cells = (f"`{name}`", option, _default(item), _change(item), _text(item.declaration.help))
        yield f"| {' | '.join(cells)} |"


def _default(item: Setting[Any, Any]) -> str:
    if item.declaration.default_text:
        return item.default_text
    shown = "false" if item.default is False else item.default_text
    return f"`{shown}`" if shown else ""


def _change(item: Setting[Any, Any]) -> str:
    if item.is_fixed:
        return "no"
    return "on only" if isinstance(item.change, OneWay) else "yes"


# -- broker settings ----------------------------------------------------------------------


def _broker_settings() -> Iterator[str]:
    yield "| key | environment | default | |\n| --- | --- | --- | --- |"
    data = "Folder of the broker's data; a path relative to the file."
    yield f"| `data` | `MILLSTREAM_DATA` | `.millstream` | {data} |"
    launch = [
        (item.name, declaration, default_text(declaration, item.default))
        for item, declaration in declared_fields(LaunchOptions)
        if item.name in settable_options()
    ]
    own = [(item.name, item.declaration, item.default_text) for item in BROKER_OPTIONS]
    for name, declaration, default in (*own, *launch):
        variable = f"`{declaration.env}`" if declaration.env else ""
        if variable and declaration.form in (Form.FILE, Form.SECRET):
            variable += " (the secret itself)"
        shown = "`false`" if declaration.form is Form.SWITCH else default
        if default and not declaration.default_text:
            shown = f"`{default}`"
        yield f"| `{name}` | {variable} | {shown} | {_text(declaration.help)} |"


# -- commands -----------------------------------------------------------------------------


def _reference() -> Iterator[str]:
    root: Any = typer.main.get_command(app)
    context = root.make_context("millstream", [], resilient_parsing=True)
    for name in root.list_commands(context):
        yield from _part(name, root.get_command(context, name))


def _part(name: str, command: Any) -> Iterator[str]:
    return _group(name, command) if hasattr(command, "commands") else _command(name, command)


def _group(name: str, group: Any) -> Iterator[str]:
    """A group of commands, which may have groups in it."""
    level = "####" if " " in name else "###"
    yield f"{level} millstream {name}\n\n{_line(group)}\n"
    for part in group.commands.values():
        yield from _part(f"{name} {part.name}", part)


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


Part = Callable[[], Iterator[str]]
PAGES: dict[Path, Mapping[str, Part]] = {
    DOCS / "CLI.md": {"topic settings": _topic_settings, "reference": _reference},
    DOCS / "OPERATIONS.md": {"broker settings": _broker_settings},
}


if __name__ == "__main__":
    main()
