"""docs/CLI.md says what the commands say, and commands keep the conventions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from millstream.cli.app import ALIASES, COMMANDS, app
from tools.command_reference import PAGES, with_generated_parts


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name."""
    root: Any = typer.main.get_command(app)
    context = root.make_context("millstream", [], resilient_parsing=True)
    for name in root.list_commands(context):
        yield from parts_of(name, root.get_command(context, name))


def parts_of(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command, or those of a group, which may have groups in it."""
    parts = getattr(command, "commands", None)
    if parts is None:
        yield name, command
        return
    for part, found in parts.items():
        yield from parts_of(f"{name} {part}", found)


ALL = dict(commands())
# These change or run something and have nothing to print but that it is done.
WITHOUT_JSON = {
    "node stop", "node kill", "topic rm", "subscription rm", "subscription resume",
    "group rm", "schedule rm",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_generated_parts_of_a_page_are_fresh(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == with_generated_parts(page), "run: python -m tools.command_reference"


def test_a_stale_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = next(page for page in PAGES if page.name == "CLI.md")
    stale = tmp_path / "CLI.md"
    stale.write_text(page.read_text(encoding="utf-8").replace("`--max-age`", "`--max-years`"))
    monkeypatch.setitem(PAGES, stale, PAGES[page])
    assert with_generated_parts(stale) == page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_command_and_each_of_its_options_have_a_help_text(name: str) -> None:
    command = ALL[name]
    assert command.help
    line = command.help.partition("\n\n")[0].strip()
    assert line.endswith("."), line
    assert [param.name for param in command.params if not param.help] == []


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_command_that_prints_data_prints_it_as_json(name: str) -> None:
    options = {option for param in ALL[name].params for option in param.opts}
    assert ("--json" in options) != (name in WITHOUT_JSON)


@pytest.mark.parametrize(
    "name", [n for n in sorted(ALL) if n.rpartition(" ")[2] in {"rm", "purge"}]
)
def test_a_destructive_command_asks(name: str) -> None:
    assert "--yes" in {option for param in ALL[name].params for option in param.opts}


def test_all_commands_of_messaging_exist() -> None:
    wanted = {
        "pub", "sub", "request", "reply", "import", "export", "trace", "top",
        *(f"topic {verb}" for verb in
          ("create", "ls", "info", "edit", "rm", "purge", "tail", "replay")),
        *(f"subscription {verb}" for verb in
          ("create", "ls", "info", "edit", "pull", "seek", "pause", "resume", "rm")),
        *(f"dlq {verb}" for verb in ("ls", "show", "edit", "redrive", "rm")),
    }  # fmt: skip
    assert wanted <= ALL.keys()
    assert set(ALIASES.values()) <= COMMANDS.keys()
