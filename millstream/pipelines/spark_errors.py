"""Finds the one useful sentence in an error that Spark wraps in stack traces. Pure."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["reason_of"]

ERROR_CHARS: Final = 2000  # enough for a sentence, not for a stack
_STACK: Final = ("at ", "File ", "Traceback", "Caused by", "...", "^", "==", "~", "JVM", "SQLSTATE")
_PYTHON: Final = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*: .+")
# What Spark puts in front of the error of a task or of a source.
_WRAPPING: Final = re.compile(
    r"^: |(org|java|scala|net|py4j)\.[\w.$]+: |"
    r"^\[(STREAM_FAILED|PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR|PYTHON_DATA_SOURCE_ERROR)\] "
)


def reason_of(error: str) -> str:
    """The last Python error in a text, else its first sentence.

    >>> reason_of("Job aborted.\\n  at x\\nCaused by: x.Python: Traceback:\\nValueError: no")
    'ValueError: no'
    >>> reason_of("An error occurred while calling o1.load.\\n: org.x.NotFound: there is none")
    'there is none'
    """
    text = error.partition("=== Streaming Query ===")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(_STACK)]
    errors = [line for line in kept if _PYTHON.fullmatch(line) or line.startswith(": ")]
    found = errors[-1:] or kept[:1] or [error]
    return _WRAPPING.sub("", _WRAPPING.sub("", found[0]))[:ERROR_CHARS]
