"""The asynchronous and the blocking client share pure modules only, never each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_layers import PACKAGE, ROOT, imports_of

FORBIDDEN = {
    "wire/aio": "millstream.wire.sync",
    "wire/sync": "millstream.wire.aio",
    "events": "millstream.wire.aio",
    "spark": "millstream.wire.aio",
}
PURE = [file for file in sorted((PACKAGE / "wire").glob("*.py")) if file.name != "__init__.py"]


@pytest.mark.parametrize(("folder", "module"), FORBIDDEN.items())
def test_a_folder_does_not_import_the_other_client(folder: str, module: str) -> None:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    assert not [file for file in files if any(name.startswith(module) for name in _imports(file))]


@pytest.mark.parametrize("file", PURE, ids=lambda file: file.name)
def test_a_shared_module_does_no_io(file: Path) -> None:
    found = _imports(file)
    assert not found & {"asyncio", "socket", "select", "threading"}
    assert not [
        name for name in found if name.startswith(("millstream.wire.aio", FORBIDDEN["wire/aio"]))
    ]


def _imports(file: Path) -> set[str]:
    package = ".".join(file.parent.relative_to(ROOT).parts)
    return set(imports_of(file.read_text(), package))
