"""`__all__` against reality: what a module says it offers is what it offers, and has a sentence."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from millstream.errors import MissingExtra

ROOT = Path(__file__).parents[2]
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


def defined(tree: ast.Module, *, imports: bool) -> set[str]:
    """Public classes and functions of the file; with `imports`, also what it re-exports."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.decorator_list or not is_command(node):
                names.add(node.name)
        elif imports and isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names.update(alias.asname or alias.name for alias in node.names)
    return {name for name in names if not name.startswith("_")}


def is_command(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    texts = [ast.unparse(item) for item in node.decorator_list]
    return any(".command" in text or ".callback" in text for text in texts)


def load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except MissingExtra as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_all_lists_exactly_the_public_names(file: Path) -> None:
    tree = ast.parse(file.read_text())
    names = listed(tree)
    is_room = file.name == "__init__.py" and module_name(file) != "millstream"
    public = defined(tree, imports=is_room)
    if names is None:
        assert not public, f"no __all__ for {sorted(public)}"
        return
    assert len(names) == len(set(names))
    assert public <= set(names), f"not in __all__: {sorted(public - set(names))}"
    if is_room:
        assert set(names) <= public, f"not re-exported: {sorted(set(names) - public)}"


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_every_listed_name_exists_and_has_a_sentence(file: Path) -> None:
    names = listed(ast.parse(file.read_text())) or []
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
        for node in ast.parse(file.read_text()).body:
            assert isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.Expr), (
                f"{module_name(file)} line {node.lineno}: code belongs into a named file"
            )


def test_the_front_door_knows_the_home_of_every_name() -> None:
    import millstream

    homes = millstream._HOMES
    assert {*homes, "MillstreamError", "__version__"} == set(millstream.__all__)
    for name, home in homes.items():
        assert getattr(millstream, name) is getattr(importlib.import_module(home), name)
    assert set(millstream.__all__) <= set(dir(millstream))


def test_an_unknown_name_is_an_attribute_error() -> None:
    import millstream

    with pytest.raises(AttributeError, match="nonsense"):
        _ = millstream.nonsense


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
