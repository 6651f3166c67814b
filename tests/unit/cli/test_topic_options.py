"""A topic setting is declared once; options, help and documentation follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import typer

from millstream.cli.commands.topic import app
from millstream.cli.options.topic import flag
from millstream.declared import Form
from millstream.messaging.topics import setting_forms
from millstream.messaging.topics.setting_forms import Fixed, OneWay, Setting
from millstream.messaging.topics.settings import TOPIC_SETTINGS, TopicSettings
from tools.command_reference import PAGES

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PAGE = next(page for page in PAGES if page.name == "CLI.md").read_text(encoding="utf-8")


def options(command: str) -> dict[str, Any]:
    return {param.name: param for param in COMMANDS[command].params}


def names(command: str, setting: str) -> set[str]:
    param = options(command)[setting]
    return {*param.opts, *param.secondary_opts}


def faults() -> Iterator[str]:
    """Settings that are missing somewhere."""
    rows = PAGE.partition("## Topic settings")[2].partition("## Reference")[0].splitlines()
    for name, item in TOPIC_SETTINGS.items():
        if not item.declaration.help.endswith((".", ")")):
            yield f"{name} has no help sentence"
        if not any(row.startswith(f"| `{name}` |") for row in rows):
            yield f"{name} has no row in docs/CLI.md"
        if item.set_by:
            if name in options("create") or name in options("edit"):
                yield f"{name} is set by '{item.set_by}' and also has an option"
            continue
        if name not in options("create"):
            yield f"{name} is no option of topic create"
        if (name in options("edit")) == item.is_fixed:
            yield f"{name} can be changed, or has an option of topic edit, but not both"


def test_every_setting_has_its_options_a_help_text_and_a_row_in_the_documentation() -> None:
    assert {field.name for field in fields(TopicSettings)} == TOPIC_SETTINGS.keys()
    assert list(faults()) == []


def test_a_setting_that_is_missing_somewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    added: Setting[bool, bool] = Setting(False, setting_forms.switch(), "no sentence")
    monkeypatch.setitem(TOPIC_SETTINGS, "added", added)
    assert list(faults()) == [
        "added has no help sentence",
        "added has no row in docs/CLI.md",
        "added is no option of topic create",
        "added can be changed, or has an option of topic edit, but not both",
    ]


@pytest.mark.parametrize(
    ("setting", "flags"),
    [
        ("partitions", {"--partitions", "-p"}),
        ("max_age", {"--max-age"}),
        ("sources", {"--source"}),
        ("message_ttl", {"--message-ttl", "--no-message-ttl"}),
        ("deny_purge", {"--deny-purge"}),  # cannot be undone, so there is no --no-deny-purge
    ],
)
def test_flags_follow_from_the_declaration(setting: str, flags: set[str]) -> None:
    assert names("create", setting) == flags
    assert flag(TOPIC_SETTINGS[setting]) in flags


def test_create_shows_defaults_and_edit_does_not() -> None:
    assert options("create")["retention"].help.endswith("(default: limits)")
    assert "default: limits" not in options("edit")["retention"].help
    assert options("create")["discard"].metavar == "old|new"


def test_every_way_to_be_fixed_says_why() -> None:
    for item in TOPIC_SETTINGS.values():
        if isinstance(item.change, Fixed | OneWay):
            assert len(item.change.why) > 10
        if isinstance(item.change, OneWay):
            assert item.kind.form is Form.SWITCH
