"""`__all__` against reality: what a module says it offers is what it offers, and has a sentence."""

from __future__ import annotations

import ast
import importlib
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from millstream.errors import MissingExtra

ROOT = Path(__file__).parents[2]
LAZY_ROOMS = sorted(
    stub.parent.relative_to(ROOT).as_posix().replace("/", ".")
    for stub in (ROOT / "millstream").rglob("__init__.pyi")
    if stub.parent.name != "millstream"
)
FILES = sorted((ROOT / "millstream").rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def listed(tree: ast.Module) -> list[str] | None:
    """The names in `__all__`, or None when the file has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def reexported(tree: ast.Module) -> set[str]:
    """Public names that a room's `__init__.py` imports."""
    names = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    return {name for name in names if not name.startswith("_")}


@cache
def parsed(file: Path) -> ast.Module:
    """The file, or the stub of a room whose names are loaded when they are used."""
    stub = file.with_suffix(".pyi")
    return ast.parse((stub if stub.is_file() else file).read_text())


def load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except MissingExtra as missing:
        pytest.skip(str(missing))


ROOMS = [file for file in FILES if file.name == "__init__.py" and file.parent.name != "millstream"]


@pytest.mark.parametrize("file", ROOMS, ids=module_name)
def test_a_room_lists_exactly_what_it_reexports(file: Path) -> None:
    tree = parsed(file)
    assert sorted(listed(tree) or []) == sorted(reexported(tree))


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_a_room_takes_from_another_only_what_that_one_lists(file: Path) -> None:
    for node in ast.walk(parsed(file)):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        source = (ROOT / Path(*node.module.split("."))).with_suffix(".py")
        same_room = source.parent == file.parent and file.parent.name != "millstream"
        if node.module.startswith("millstream.") and source.is_file() and not same_room:
            offered = set(listed(parsed(source)) or [])
            taken = {alias.name for alias in node.names}
            assert taken <= offered, f"{node.module} does not list {sorted(taken - offered)}"


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_every_listed_name_exists_and_has_a_sentence(file: Path) -> None:
    names = listed(parsed(file)) or []
    if not names:
        return
    module = load(module_name(file))
    for name in names:
        value = getattr(module, name)
        if callable(value) and getattr(value, "__module__", "").startswith("millstream"):
            assert (value.__doc__ or "").strip(), f"{module_name(file)}.{name} has no docstring"


def test_a_room_only_reexports() -> None:
    for file in FILES:
        if file.name != "__init__.py" or module_name(file) == "millstream":
            continue
        for node in parsed(file).body:
            assert isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.Expr), (
                f"{module_name(file)} line {node.lineno}: code belongs into a named file"
            )


def test_the_front_door_lists_what_its_stub_imports() -> None:
    import millstream

    stub = ast.parse((ROOT / "millstream" / "__init__.pyi").read_text())
    homes = {
        alias.name: str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name  # else type checkers do not see it
    }
    assert homes.pop("blocking") == "millstream"
    exported: list[str] = vars(millstream)["__all__"]
    assert sorted(homes) == sorted(exported)
    for name, home in homes.items():
        assert getattr(millstream, name) is getattr(importlib.import_module(home), name)
    assert {*exported, "blocking"} <= set(dir(millstream))
    assert millstream.blocking is importlib.import_module("millstream.blocking")


@pytest.mark.parametrize("name", ["millstream", *LAZY_ROOMS])
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = importlib.import_module(name).nonsense


@pytest.mark.parametrize("name", LAZY_ROOMS)
def test_a_lazy_room_has_the_names_of_its_stub_and_nothing_else_to_run(name: str) -> None:
    file = ROOT / name.replace(".", "/") / "__init__.py"
    room = importlib.import_module(name)
    assert sorted(room.__all__) == sorted(listed(parsed(file)) or [])
    assert set(room.__all__) <= set(dir(room))
    assert len(ast.parse(file.read_text()).body) == 3  # docstring, import, assignment
    with (ROOT / "pyproject.toml").open("rb") as text:
        packaged = tomllib.load(text)["tool"]["setuptools"]["package-data"]
    assert "__init__.pyi" in packaged[name]


def test_the_error_tree_is_drawn_as_it_is() -> None:
    from millstream import errors

    drawn = {
        line.strip("│├└─ ").split()[0]
        for line in (errors.__doc__ or "").splitlines()
        if line.startswith(("│", "├", "└", "MillstreamError"))
    }
    assert drawn == set(errors.__all__)


def test_every_error_is_a_millstream_error() -> None:
    from millstream import errors

    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.MillstreamError)
