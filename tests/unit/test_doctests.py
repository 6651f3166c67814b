"""The examples in docstrings are run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from millstream.errors import MissingExtra

ROOT = Path(__file__).parents[2]
NAMES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted((ROOT / "millstream").rglob("*.py"))
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of(name: str) -> None:
    try:
        module = importlib.import_module(name.removesuffix(".__init__"))
    except MissingExtra as missing:
        pytest.skip(str(missing))
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
