"""What is found in the errors of failed queries. The texts are Spark's, shortened."""

from __future__ import annotations

from pathlib import PurePath

import pytest

from millstream.pipelines.attempts import _guarded
from millstream.pipelines.restarts import Restarts
from millstream.pipelines.spark_errors import Failure, failure_of, missing_schema, reason_of

PROJECT = PurePath("/srv/millstream/project")
HEAD = "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: "
TAIL = """
=== Streaming Query ===
Identifier: words.broken [id = 1, runId = 2]
Current Committed Offsets: {PythonMicroBatchStream@OBJECT: {"lines":{"0":{"next":120,"log":"x"}}}}
Current Available Offsets: {PythonMicroBatchStream@OBJECT: \
{"lines":{"0":{"next":481,"log":"x"},"1":{"next":8,"log":"y"}}}, Rate: {"offset":7}}

Logical Plan: ...
"""
BATCH = "lines partition 0 offsets 120 to 480, lines partition 1 offsets up to 7"
PYTHON = """[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most \
recent call last):
  File "/venv/lib/python3.11/site-packages/pyspark/worker.py", line 4207, in invoke_udf
    process()
  File "/srv/millstream/project/flows.py", line 12, in to_rate
    return helper(x)
  File "/srv/millstream/project/more/rates.py", line 3, in helper
    return numpy.divide(1, x)
  File "/venv/lib/python3.11/site-packages/numpy/core.py", line 88, in divide
    raise ERROR
  File "numpy/_core/lib.pyx", line 7, in numpy.lib.divide
ERROR: float division by zero
 SQLSTATE: 38000 SQLSTATE: XXKST"""
SQL = """[DIVIDE_BY_ZERO] Division by zero. Use `try_divide` instead. SQLSTATE: 22012
== SQL (line 1, position 1) ==
1 / x AS rate
^^^^^
 SQLSTATE: XXKST"""
COLUMN = """[CAST_INVALID_INPUT] The value 'a' cannot be cast. SQLSTATE: 22018
== DataFrame ==
"cast" was called from
/srv/millstream/project/flows.py:37
 SQLSTATE: XXKST"""
WRONG_TYPE = """Traceback (most recent call last):
  File "pyarrow/array.pxi", line 424, in pyarrow.lib.array
pyarrow.lib.ArrowInvalid: Could not convert 'seven' with type str: tried to convert to int64
 SQLSTATE: 38000"""
BROKER_AWAY = """Traceback (most recent call last):
  File "/srv/millstream/millstream/spark/source/stream_reader.py", line 80, in latestOffset
    raise NotConnected
millstream.errors.NotConnected: no server answers
 SQLSTATE: 38000"""
LOST_EXECUTOR = (
    "Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times: ExecutorLostFailure"
)


def failure(text: str, error: str = "ZeroDivisionError", source: str = "5a5") -> Failure:
    whole = f"{HEAD}{text}{TAIL}".replace("ERROR", error).replace("OBJECT", source)
    return failure_of(whole, PROJECT)


@pytest.mark.parametrize(
    ("text", "reason", "where"),
    [
        (PYTHON, "ZeroDivisionError: float division by zero", "in helper, more/rates.py:3"),
        (
            PYTHON.replace("in helper", "in <lambda>"),
            "ZeroDivisionError: float division by zero",
            "in more/rates.py:3",
        ),
        (
            SQL,
            "[DIVIDE_BY_ZERO] Division by zero. Use `try_divide` instead.",
            'in "1 / x AS rate"',
        ),
        (COLUMN, "[CAST_INVALID_INPUT] The value 'a' cannot be cast.", "in flows.py:37"),
    ],
)
def test_an_error_of_the_projects_code_names_its_line_and_the_batch(
    text: str, reason: str, where: str
) -> None:
    found = failure(text)
    assert (found.reason, found.where, found.batch) == (reason, where, BATCH)
    assert str(found).startswith(f"{reason.rstrip('.')} ({where}); the batch has {BATCH}. To set")


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        ("struct.error: unpack requires 4 bytes", "struct.error: unpack requires 4 bytes"),
        ("ValueError: no\nThird: Line", "ValueError: no"),
        ("millstream.errors.data.Unfit: no key", "no key"),
    ],
)
def test_the_reason_is_the_line_after_the_frames(raised: str, reason: str) -> None:
    assert failure(PYTHON.replace("ERROR: float division by zero", raised)).reason == reason


def test_a_query_that_spark_refuses_is_its_sentence_and_not_its_plan() -> None:
    text = (
        "LeftOuter join is not supported in Update output mode;\n~Join LeftOuter\n:- ~A\n:  +- ~B"
    )
    assert reason_of(text) == "LeftOuter join is not supported in Update output mode"


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Odd(), "Odd: its text cannot be shown (in refuse"),
        (ValueError("half \ud800"), "ValueError: half \\ud800 (in refuse"),
    ],
)
def test_an_attempt_tells_of_an_error_that_has_no_text(error: Exception, text: str) -> None:
    def refuse() -> None:
        raise error

    value, refused = _guarded(refuse)()
    assert value is None
    assert str(refused).startswith(text)


def test_an_error_without_a_message_is_found() -> None:
    text = PYTHON.replace("ERROR: float division by zero", "AssertionError")
    assert failure(text).reason == "AssertionError"


def test_a_result_of_a_wrong_type_is_not_tried_for_long() -> None:
    found = failure(WRONG_TYPE)
    assert (found.where, found.mark is not None) == ("", True)
    assert "tried to convert to int64; the batch has lines partition 0" in str(found)


@pytest.mark.parametrize("text", [BROKER_AWAY, LOST_EXECUTOR])
def test_an_error_outside_the_projects_code_has_no_line_and_may_pass(text: str) -> None:
    found = failure(text)
    assert (found.where, found.mark) == ("", None)
    assert str(found) == found.reason


@pytest.mark.parametrize(
    "name",
    [
        "ConnectionError",
        "socket.gaierror",
        "http.client.RemoteDisconnected",
        "requests.exceptions.ReadTimeout",
        "OSError",
        "OperationalError",
    ],
)
def test_a_service_that_the_projects_code_does_not_reach_may_come_back(name: str) -> None:
    found = failure(PYTHON, name)
    assert (found.where, found.mark) == ("in helper, more/rates.py:3", None)


def test_only_the_same_failure_of_the_same_batch_is_final() -> None:
    restarts = Restarts(limit=5)
    first, other = failure(PYTHON), failure(PYTHON, "KeyError")
    assert [restarts.failed(f.mark) for f in (first, other, first)] == [1, 2, 4]
    assert restarts.failed(failure(PYTHON, source="77f").mark) is None  # after a restart
    restarts.succeeded()
    assert restarts.failed(first.mark) == 1
    next_batch = failure_of(f"{HEAD}{PYTHON}{TAIL}".replace("481", "500"), PROJECT)
    assert restarts.failed(next_batch.mark) == 2
    for _ in range(3):
        assert restarts.failed(failure(BROKER_AWAY).mark) is not None
    assert restarts.failed(failure(BROKER_AWAY).mark) is None


def test_the_reason_of_a_database_is_named() -> None:
    text = """Traceback (most recent call last):
  File "/x/site-packages/py4j/protocol.py", line 327, in get_return_value
    raise Py4JJavaError(
py4j.protocol.Py4JJavaError: An error occurred while calling o1227.save.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 11.0 failed 4 \
times, most recent failure: Lost task 0.3 in stage 11.0 (TID 18) (192.0.2.2 executor driver): \
java.sql.SQLDataException: The value is outside the range for the data type INTEGER.
\tat org.apache.derby.impl.jdbc.SQLExceptionFactory.getSQLException(SQLExceptionFactory.java:84)
"""
    found = failure(text)
    assert found.reason == "The value is outside the range for the data type INTEGER."
    assert found.mark is None


def test_state_of_other_columns_is_final_and_says_what_to_do() -> None:
    name = "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE"
    found = failure(f"[{name}] Provided value schema does not match existing state value schema.")
    assert str(found).startswith(
        f"its state in the checkpoint has other columns than the flow has now: {name}. Choose the "
        "columns that it had before, with 'select'"
    )
    assert "millstream pipeline reset" in str(found)
    restarts = Restarts(limit=5)
    assert [restarts.failed(found.mark), restarts.failed(found.mark)] == [1, None]


def test_only_some_of_many_partitions_are_listed() -> None:
    many = ",".join(f'"{n}":{{"next":9,"log":"x"}}' for n in range(10))
    found = failure_of(f'Current Available Offsets: {{S: {{"lines":{{{many}}}}}}}', PROJECT)
    assert found.batch.endswith("lines partition 3 offsets up to 8 and 6 more partitions")


def test_a_missing_column_that_the_format_has_on_request_comes_with_the_option() -> None:
    text = (
        "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column, variable, or function parameter with name "
        "`{}` cannot be resolved. Did you mean one of the following? [`key`, `value`]."
    )
    found = missing_schema(text.format("offset"), [])
    assert found.endswith("have the column 'offset' with the option includeMetadata = true")
    assert missing_schema(text.format("price"), []) == text.format("price").rstrip(".")
