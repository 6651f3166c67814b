"""Finds what matters in an error that Spark wraps in stack traces: reason, line, batch. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from millstream.errors import ConfigError
from millstream.spark.options import METADATA
from millstream.spark.source.offsets import SourceOffset, from_json

__all__ = ["Failure", "failure_of", "in_code", "may_pass", "missing_schema", "reason_of"]

ERROR_CHARS: Final = 2000  # enough for a sentence, not for a stack
RANGES_SHOWN: Final = 4  # of the partitions that a batch read
ADVICE: Final = (
    "To set such rows aside: mp.attempt, or SQL's try_ functions "
    '("When your code fails" in docs/PIPELINES.md)'
)
STATE_ADVICE: Final = (
    "Choose the columns that it had before, with 'select' in front of the join or aggregation, or "
    "start the flow from scratch with 'millstream pipeline reset' "
    '("New columns" in docs/PIPELINES.md)'
)
_STACK: Final = ("at ", "File ", "Traceback", "Caused by", "...", "^", "==", "~", "JVM", "SQLSTATE")
_PYTHON: Final = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*(: .+|(?<=Error)|(?<=Exception))")
# The first line of an error's text, after the frames of its traceback.
_RAISED: Final = re.compile(
    r'^\s*File ".+?", line \d+, in .+\n(?:[ \t]+.*\n)*(?P<error>[A-Za-z_][\w.]*(: .*)?)$', re.M
)
_CALL_OF_JAVA: Final = "py4j.protocol.Py4JJavaError: "  # the reason is in the next line
_OURS: Final = re.compile(r"^millstream\.errors\.[\w.]+: ")
_JAVA: Final = re.compile(r": \S")  # py4j writes an error of Java like this; plans have more spaces
# What Spark puts in front of the error of a task, a query or a source.
_WRAPPING: Final = re.compile(
    r"^.*\[PYTHON_(STREAMING_DATA_SOURCE_RUNTIME|DATA_SOURCE)_ERROR\] [^:]*: "
    r"(millstream\.errors\.[\w.]+: )?|"
    r"Job aborted due to stage failure: .*? executor [^)]*\): |"
    r"^: |(org|java|scala|net|py4j)\.[\w.$]+: |"
    r"^\[STREAM_FAILED\] Query \[[^\]]*\] terminated with exception: |"
    r"^\[STREAM_FAILED\] "
)
# Spark's words and ours (pipelines/joins.py).
_MISSING_COLUMN: Final = re.compile(r"\[UNRESOLVED_\w*COLUMN|has no column")
_UNRESOLVED: Final = re.compile(r"\[UNRESOLVED_\w*COLUMN.*? with name `(?P<name>\w+)`")
_SQLSTATE: Final = re.compile(r" SQLSTATE: (\w{5})")
# Errors of values in SQL: class 22 is "data exception", P0001 is raise_error and assert_true.
_DATA_ERROR: Final = re.compile(r"\[(?P<name>[A-Z_.]+)\] .*? SQLSTATE: (22\w{3}|P0001)")
# The state in a checkpoint is of other columns, or of another operator, than the flow has now.
_STATE_CHANGED: Final = re.compile(
    r"\[(STATE_STORE_(?:KEY|VALUE)_SCHEMA_NOT_COMPATIBLE"
    r"|STREAMING_STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA)\]"
)
_SQL: Final = re.compile(r"^== SQL.*==\n(?P<text>.+)$", re.MULTILINE)
_CALLED: Final = re.compile(r"^== DataFrame ==\n.*\n(?P<file>.+):(?P<line>\d+)$", re.MULTILINE)
_FRAME: Final = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+), in (?P<name>.+)$', re.M)
_LIBRARY: Final = re.compile(
    r"^<|\.pyx$|\.pxi$|/(site|dist)-packages/|/lib/python3|/pyspark(\.zip)?/|"
    r"/millstream/(spark|pipelines|events|wire|messaging|schemas|cdc)/"
)
# Errors of code that calls a service or a database.
_PASSING: Final = re.compile(
    r"[Cc]onnect|gaierror|SSLError|Timeout|TimedOut|Unavailable|BrokenPipe|OSError|IOError|URLError"
    r"|HTTP|Operational|MemoryError"
)
# A UDF's result is not of the type that it declares.
_WRONG_TYPE: Final = re.compile(r"ArrowInvalid|ArrowTypeError|PySparkTypeError")
_OBJECT: Final = re.compile(r"@[0-9a-f]+(?=: )")
_START: Final = re.compile(r"^Current Committed Offsets: (.*)$", re.MULTILINE)
_END: Final = re.compile(r"^Current Available Offsets: (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a flow failed, and whether the same rows would make it fail again."""

    reason: str
    where: str = ""  # in the project's code, or the SQL text
    batch: str = ""  # what the batch had read: topics, partitions, offsets
    # Identifies a failure that the project's code and the rows of the batch cause together, so
    # that trying again does not help. None: it may pass.
    mark: str | None = None
    advice: str = ADVICE  # what to do if it does not pass

    def __str__(self) -> str:
        text = f"{self.reason.rstrip('.')} ({self.where})" if self.where else self.reason
        if self.batch and self.mark:
            text += f"; the batch has {self.batch}"
        return f"{text}. {self.advice}" if self.mark else text


def reason_of(error: str) -> str:
    """The last Python error in a text, else its first sentence.

    >>> reason_of("Job aborted.\\n  at x\\nCaused by: x.Python: Traceback:\\nValueError: no")
    'ValueError: no'
    >>> reason_of("An error occurred while calling o1.load.\\n: org.x.NotFound: there is none")
    'there is none'
    >>> reason_of("[PYTHON_DATA_SOURCE_ERROR] Failed to plan: millstream.errors.base.X: no: this")
    'no: this'
    """
    text = error.partition("=== Streaming Query ===")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(_STACK)]
    raised = [found["error"] for found in _RAISED.finditer(text)]
    raised = [error for error in raised if not error.startswith(_CALL_OF_JAVA)]
    errors = raised or [line for line in kept if _PYTHON.fullmatch(line) or _JAVA.match(line)]
    found = errors[-1:] or kept[:1] or [error]
    bare = _SQLSTATE.sub("", _WRAPPING.sub("", _WRAPPING.sub("", found[0])))
    return bare.rstrip(";")[:ERROR_CHARS]


def missing_schema(reason: str, without: Collection[str]) -> str:
    """A reason; one about a missing column also names the inputs that have no schema.

    It also says how to get a column that the format has only on request.

    >>> missing_schema("there is no such file", ["customers"])
    'there is no such file'
    """
    if not _MISSING_COLUMN.search(reason):
        return reason
    advice = [
        f"The input '{name}' has no schema, so its columns are those of an event: register one "
        f"with 'millstream schema register {name} FILE', or take columns out of 'value', for "
        f"example with from_json"
        for name in sorted(without)
    ]
    missing = _UNRESOLVED.search(reason)
    if missing and missing["name"] in METADATA:
        advice.append(
            f"Topics with a schema that are read by format('millstream') have the column "
            f"'{missing['name']}' with the option includeMetadata = true"
        )
    return ". ".join([reason.rstrip("."), *advice])


def failure_of(error: str, folder: PurePath) -> Failure:
    """What a query's error says; `folder` is the project's."""
    text = error.partition("=== Streaming Query ===")[0]
    if changed := _STATE_CHANGED.search(text):
        reason = (
            f"its state in the checkpoint has other columns than the flow has now: {changed[1]}"
        )
        return Failure(reason, mark=changed[1], advice=STATE_ADVICE)
    reason = reason_of(error)
    start, end = _START.search(error), _END.search(error)
    starts, ends = start[1] if start else "", end[1] if end else ""
    frames = [(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(text)]
    where = in_code(frames, folder)
    name = reason.partition(":")[0]
    if where:
        lasting = not may_pass(name)
    elif data_error := _DATA_ERROR.search(text):
        name, lasting = data_error["name"], True
        where = _in_sql(text, folder)
    else:
        lasting = _WRONG_TYPE.search(name) is not None
    # Spark names a source by its object, which is another one after a restart.
    mark = f"{name} {where} {_OBJECT.sub('', ends)}" if lasting else None
    return Failure(
        _OURS.sub("", reason), where, _ranges(_positions(starts), _positions(ends)), mark
    )


def may_pass(name: str) -> bool:
    """Whether an error of this name can pass by itself, even if the project's code raises it.

    >>> may_pass("ConnectionResetError"), may_pass("ZeroDivisionError")
    (True, False)
    """
    return _PASSING.search(name) is not None


def in_code(frames: Iterable[tuple[str, int, str]], folder: PurePath | None = None) -> str:
    """The last frame (file, line, function) that is not in a library, as words; "" without one.

    >>> in_code([("/p/flows.py", 12, "rate"), ("/x/site-packages/a.py", 3, "f")], PurePath("/p"))
    'in rate, flows.py:12'
    """
    own = [frame for frame in frames if _is_own(frame[0], folder)]
    if not own:
        return ""
    file, line, name = own[-1]
    function = "" if name.startswith("<") else f"{name}, "
    return f"in {function}{_short(file, folder)}:{line}"


def _is_own(file: str, folder: PurePath | None) -> bool:
    inside = folder is not None and PurePath(file).is_relative_to(folder)
    return not _LIBRARY.search(_short(file, folder) if inside else file)


def _short(file: str, folder: PurePath | None) -> str:
    path = PurePath(file)
    inside = folder is not None and path.is_relative_to(folder)
    return str(path.relative_to(folder)) if folder is not None and inside else file


def _in_sql(text: str, folder: PurePath) -> str:
    called = _CALLED.search(text)
    if called:
        return f"in {_short(called['file'], folder)}:{called['line']}"
    written = _SQL.search(text)
    return f'in "{written["text"].strip()}"' if written else ""


# -- the batch ------------------------------------------------------------------------------


def _ranges(starts: SourceOffset, ends: SourceOffset) -> str:
    words = []
    for (topic, number), end in sorted(ends.items()):
        start = starts.get((topic, number))
        if start is None:
            words.append(f"{topic} partition {number} offsets up to {end.next - 1}")
        elif start.next < end.next:
            words.append(f"{topic} partition {number} offsets {start.next} to {end.next - 1}")
    more = len(words) - RANGES_SHOWN
    return ", ".join(words[:RANGES_SHOWN]) + (f" and {more} more partitions" if more > 0 else "")


def _positions(text: str) -> SourceOffset:
    """The offsets in Spark's list of sources and their offsets; those of other sources are left.

    >>> _positions('{PythonStream@1: {"a": {"0": {"next": 5, "log": "x"}}}, Rate: {"offset": 7}}')
    {('a', 0): PartitionOffset(next=5, created='x', last_time='', tasks=1)}
    """
    found: SourceOffset = {}
    for start in re.finditer(r'\{"', text):
        try:
            found |= from_json(json.JSONDecoder().raw_decode(text, start.start())[0])
        except (ConfigError, ValueError):
            continue  # an inner part, or an offset of another source
    return found
