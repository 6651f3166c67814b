"""What importing the schemas loads: Arrow only where columns are read or written."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = """
import dataclasses
import millstream.schemas.registry.registry
from millstream.schemas import check, declare, make_codec

@dataclasses.dataclass
class Order:
    id: int

schema = declare(Order)
assert make_codec(schema, "json").decode(b'{"id":1}') == {"id": 1}
assert check(schema, [schema], "FULL") == []
"""
HEAVY = "from millstream.schemas import ColumnBuilder"


@pytest.mark.parametrize(
    ("code", "loaded"), [(LIGHT, False), (HEAVY, True)], ids=["light", "heavy"]
)
def test_only_columns_need_arrow(code: str, loaded: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('pyarrow' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(loaded)
