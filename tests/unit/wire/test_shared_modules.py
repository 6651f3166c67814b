"""What both clients share is pure: the modules directly in wire do no I/O."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_layers import PACKAGE, imports_of, package_of

SHARED = [file for file in sorted((PACKAGE / "wire").glob("*.py")) if file.name != "__init__.py"]


@pytest.mark.parametrize("file", SHARED, ids=lambda file: file.name)
def test_a_shared_module_does_no_io(file: Path) -> None:
    found = {one.module for one in imports_of(file.read_text(), package_of(file))}
    assert not found & {"asyncio", "socket", "select", "threading"}
