"""How the blocking API is imported, and what that costs."""

from __future__ import annotations

import ast
import subprocess
import sys


def printed(code: str) -> object:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout)


def test_it_is_available_after_import_millstream() -> None:
    assert printed("import millstream; print(repr(millstream.blocking.connect.__name__))")


def test_importing_it_starts_no_thread_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, threading, millstream.blocking\n"
        "heavy = ['pyarrow', 'pyspark', 'pandas', 'pydantic', 'fastavro']\n"
        "print((threading.active_count(), [m for m in heavy if m in sys.modules]))"
    )
    assert printed(code) == (1, [])
