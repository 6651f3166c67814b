"""Groups of options: one parameter of a command, several options of the command line."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from millstream.cli.options.groups import OptionGroup, declared_option, grouped
from millstream.declared import Declaration, Form, declared

# Annotations are not postponed here: the fields of a group must be types when it is used.


@dataclass(frozen=True)
class Filter:
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file.")]
    key: Annotated[list[str] | None, typer.Option("--key", "-k", help="A key.")] = None
    limit: int = declared(7, Declaration("At most N.", Form.NUMBER, env="TEST_GROUPS_LIMIT"))


def table() -> list[Any]:
    switch = Declaration("A switch.", Form.SWITCH, flags=("--on/--off",))
    return [declared_option("on", switch), declared_option("max_age", Declaration("An age."))]


Table = Annotated[dict[str, Any], OptionGroup(table, dict)]


def run(*arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """What a command with two groups and a plain option receives."""
    seen: dict[str, Any] = {}
    app = typer.Typer()

    @app.command()
    @grouped
    def command(
        chosen: Filter,
        values: Table,
        json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    ) -> None:
        """Run."""
        seen.update(chosen=chosen, values=values, json=json_)

    result = CliRunner().invoke(app, list(arguments), env=env, catch_exceptions=False)
    seen["output"] = result.output
    return seen


def test_options_that_are_not_given_have_their_defaults() -> None:
    seen = run("a.txt")
    assert seen["chosen"] == Filter("a.txt")
    assert seen["values"] == {"on": None, "max_age": None}
    assert seen["json"] is False


def test_every_field_is_an_option() -> None:
    seen = run(
        "a.txt", "-k", "x", "--key", "y", "--limit", "3", "--off", "--max-age", "1h", "--json"
    )
    assert seen["chosen"] == Filter("a.txt", ["x", "y"], 3)
    assert seen["values"] == {"on": False, "max_age": "1h"}
    assert seen["json"] is True


def test_a_declared_field_can_come_from_its_environment_variable() -> None:
    assert run("a.txt", env={"TEST_GROUPS_LIMIT": "9"})["chosen"].limit == 9
    assert run("a.txt", "--limit", "3", env={"TEST_GROUPS_LIMIT": "9"})["chosen"].limit == 3


def test_the_help_lists_the_options_of_all_groups() -> None:
    shown = run("--help")["output"]
    for text in ("FILE", "--key", "--limit", "NUMBER", "--on", "--off", "--max-age", "--json"):
        assert text in shown


def test_two_options_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="duplicate parameter name: 'key'"):

        @grouped
        def command(chosen: Filter, key: str) -> None: ...
