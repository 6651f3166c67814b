"""Pipeline projects on real Spark and a real broker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millstream.errors import PipelineBusy, PipelineInvalid
from tests.spark.pipelines.project_kit import HEAD, Kit, wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.conftest import Account

WORDS = (
    HEAD
    + """
@mp.view
def words():
    text = f.col("value").cast("string")
    return mp.read("lines").select(f.explode(f.split(text, " ")).alias("word"))

@mp.topic(key="word")
def stored():
    return mp.read("words")

@mp.table(key="word")
def counts():
    return mp.read("stored").groupBy("word").agg(f.count("*").alias("times"))

@mp.files
def lake():
    return mp.read("stored")
"""
)


@pytest.fixture
def kit(spark: SparkSession, account: Account, tmp_path: Path) -> Kit:
    account.topic("lines")
    return Kit(spark, account, tmp_path)


def counts(kit: Kit) -> dict[str, int]:
    return {key: value["times"] for key, value in kit.table("counts").items()}


def test_once_catches_up_through_every_flow_and_a_second_run_adds_what_is_new(kit: Kit) -> None:
    kit.write(WORDS)
    kit.lines("to be or", "not to be")
    flows = kit.once()
    assert counts(kit) == {"to": 2, "be": 2, "or": 1, "not": 1}
    assert {name: flow["state"] for name, flow in flows.items()} == {
        "stored": "done",
        "counts": "done",
        "lake": "done",
    }
    assert (flows["stored"]["rows_in"], flows["stored"]["rows_out"]) == (2, 6)
    assert flows["counts"]["rows_out"] == 4
    assert flows["stored"]["lag_messages"] == 0
    assert flows["counts"]["state_rows"] == 4
    kit.lines("be")
    kit.once()
    assert counts(kit) == {"to": 2, "be": 3, "or": 1, "not": 1}
    assert len(kit.account.values("stored")) == 7
    assert kit.spark.read.parquet(str(kit.folder / "data" / "lake")).count() == 7


def test_a_running_pipeline_follows_its_topics_and_stops_between_two_batches(kit: Kit) -> None:
    kit.write(WORDS)
    with kit.running() as runner:
        wait_for(lambda: runner.status("")["flows"][0]["state"] == "running")
        kit.lines("one two")
        wait_for(lambda: _has(kit, {"one": 1, "two": 1}))
        kit.lines(*["two three"] * 50)
        wait_for(lambda: _has(kit, {"one": 1, "two": 51, "three": 50}))
        status = json.loads((kit.folder / ".pipeline" / "status.json").read_text())
        assert status["state"] == "running"
        with pytest.raises(PipelineBusy):
            kit.once()
        kit.lines(*["four"] * 100)  # some of them are being processed when it stops
    for flow in ("stored", "counts", "lake"):
        folder = kit.folder / ".pipeline" / "checkpoints" / flow
        started = {p.name for p in (folder / "offsets").iterdir() if p.name.isdigit()}
        ended = {p.name for p in (folder / "commits").iterdir() if p.name.isdigit()}
        assert started == ended
    status = json.loads((kit.folder / ".pipeline" / "status.json").read_text())
    assert {flow["state"] for flow in status["flows"]} == {"stopped"}
    kit.once()
    assert counts(kit)["four"] == 100


def _has(kit: Kit, wanted: dict[str, int]) -> bool:
    try:
        return counts(kit) == wanted
    except LookupError:
        return False


FAILING = (
    HEAD
    + """
from pathlib import Path

def note_call(name):
    with open(FLAG + "-calls", "a") as calls:
        print(name, file=calls)

@f.udf("string")
def fragile(text):
    if Path(FLAG).exists():
        raise ERROR("the mill stone broke")
    return text

@mp.topic
def broken():
    note_call("broken")
    return mp.read("lines").select(fragile(f.col("value").cast("string")).alias("text"))

@mp.topic
def sound():
    note_call("sound")
    return mp.read("lines").select(f.col("value").cast("string").alias("text"))
"""
)


def failing_with(error: str, flag: Path) -> str:
    return FAILING.replace("ERROR", error).replace("FLAG", repr(str(flag)))


def test_a_failing_flow_is_restarted_with_its_reason_while_the_others_continue(kit: Kit) -> None:
    flag = kit.folder / "flag"
    flag.touch()
    # Enough that it is still restarted while the test waits for the other flow.
    kit.write(failing_with("ConnectionError", flag), "restarts = 1000\n")
    with kit.running() as runner:
        kit.lines("a")

        def flow(name: str) -> dict[str, Any]:
            return next(f for f in runner.status("")["flows"] if f["name"] == name)

        wait_for(lambda: flow("broken")["restarts"] >= 1)
        reason = "ConnectionError: the mill stone broke (in fragile, pipeline.py:14)"
        assert flow("broken")["last_error"] == reason
        kit.lines("b")
        wait_for(lambda: flow("sound")["rows_out"] >= 2)
        flag.unlink()
        wait_for(lambda: flow("broken")["rows_out"] >= 2)
        assert flow("broken")["state"] == "running"
    calls = Path(f"{flag}-calls").read_text().split()
    assert calls.count("broken") >= 2
    assert calls.count("sound") == 1  # a restart leaves the other flows alone
    assert [v["text"] for v in kit.account.values("broken")] == ["a", "b"]
    assert [v["text"] for v in kit.account.values("sound")] == ["a", "b"]


def test_a_flow_whose_rows_fail_again_is_given_up_while_the_others_continue(kit: Kit) -> None:
    flag = kit.folder / "flag"
    flag.touch()
    kit.write(failing_with("ValueError", flag))
    kit.lines("a")
    with kit.running() as runner:

        def flow(name: str) -> dict[str, Any]:
            return next(f for f in runner.status("")["flows"] if f["name"] == name)

        wait_for(lambda: flow("broken")["state"] == "failed")
        assert flow("broken")["restarts"] == 1  # of 5: the batch failed twice in the same way
        kit.lines("b")
        wait_for(lambda: flow("sound")["rows_out"] == 2)
        assert flow("sound")["state"] == "running"
    assert (
        "'broken': ValueError: the mill stone broke (in fragile, pipeline.py:14); the batch has "
        "lines partition 0 offsets 1 to 1. To set such rows aside"
    ) in str(kit.failed)
    assert [v["text"] for v in kit.account.values("sound")] == ["a", "b"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            """
@mp.topic
def a(): return mp.read("b")
@mp.topic
def b(): return mp.read("a")
""",
            "has a cycle: a -> b -> a",
        ),
        ("@mp.topic\ndef a(): return mp.read('lined')", "did you mean 'lines'"),
        ("@mp.topic\ndef a(): return 5", r"'a' \(pipeline.py:\d+\) returned int, not a DataFrame"),
        ("@mp.topic\ndef a(): return mp.read('lines').select('nope')", "'a' .* failed: .*nope"),
        ("@mp.topic(key='k')\ndef a(): return mp.read('lines')", "no column 'k'"),
        ("@mp.topic\ndef a(): return {}['x']", "'a' .* failed: KeyError"),
        (
            "mp.sink('s', 'noop')\n@mp.flow('s')\ndef w(): return mp.read('lines')\n"
            "@mp.topic\ndef a(): return mp.read('s')",
            "is a sink",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    kit: Kit, code: str, message: str
) -> None:
    kit.write(HEAD + code)
    with pytest.raises(PipelineInvalid, match=message):
        kit.graph()


def test_a_flow_that_spark_refuses_stops_the_run_with_the_reason(kit: Kit) -> None:
    kit.write(
        HEAD
        + "@mp.topic\ndef a(): return mp.read('lines').groupBy('key').agg(f.count('*').alias('n'))"
    )
    with pytest.raises(PipelineInvalid, match=r"'a' cannot start: .*append"):
        kit.once()


def test_the_graph_is_known_without_running_or_creating_anything(kit: Kit) -> None:
    kit.write(WORDS)
    found = kit.graph()
    assert found.edges == {
        ("lines", "words"),
        ("words", "stored"),
        ("stored", "counts"),
        ("stored", "lake"),
    }
    assert found.nodes["lines"].outside
    assert kit.account.run(_names) == ["lines"]


async def _names(mill: Any) -> list[str]:
    return [info.name for info in await mill.topics()]


def test_new_columns_become_the_next_version_of_a_topic(kit: Kit) -> None:
    code = HEAD + "@mp.topic\ndef a(): return mp.read('lines').select({})"
    kit.write(code.format("f.length('value').alias('size')"))
    kit.lines("abc")
    kit.once()
    kit.write(code.format("f.length('value').alias('size'), f.lit('x').alias('mark')"))
    kit.lines("abcd")
    kit.once()
    assert kit.account.values("a") == [{"size": 3, "mark": None}, {"size": 4, "mark": "x"}]


def test_several_flows_write_to_one_topic_and_no_row_is_lost(kit: Kit) -> None:
    kit.account.topic("more")
    kit.write(
        HEAD
        + """
@mp.topic
def all():
    return mp.read("lines").select(f.col("value").cast("string").alias("text"))

@mp.flow("all")
def also():
    return mp.read("more").select(f.col("value").cast("string").alias("text"))
"""
    )
    kit.lines(*[f"a{n}" for n in range(20)])
    kit.account.publish("more", [f"b{n}".encode() for n in range(20)])
    kit.once()
    wanted = sorted([f"a{n}" for n in range(20)] + [f"b{n}" for n in range(20)])
    assert sorted(value["text"] for value in kit.account.values("all")) == wanted


def test_jdbc_stores_each_batch_once_even_if_it_runs_again(kit: Kit) -> None:
    url = f"jdbc:derby:{kit.folder}/derby;create=true"
    kit.write(
        HEAD
        + f"""
mp.sink("base", "jdbc", url={url!r}, dbtable="lines", batchColumn="batch",
        driver="org.apache.derby.jdbc.EmbeddedDriver")
@mp.flow("base")
def rows():
    return mp.read("lines").select(f.col("value").cast("string").alias("text"))
"""
    )
    kit.lines("a", "b")
    kit.once()
    commits = kit.folder / ".pipeline" / "checkpoints" / "rows" / "commits"
    last = max((p for p in commits.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    last.unlink()
    (commits / f".{last.name}.crc").unlink(missing_ok=True)
    kit.lines("c")
    kit.once()
    stored = kit.spark.read.format("jdbc").options(url=url, dbtable="lines").load()
    assert sorted(row["text"] for row in stored.collect()) == ["a", "b", "c"]
    # After a reset batches are numbered from 0 again, and no row passes for one that is stored.
    (kit.folder / ".pipeline" / "checkpoints" / "rows").rename(kit.folder / "old")
    kit.once()
    assert sorted(row["text"] for row in stored.collect()) == ["a", "a", "b", "b", "c", "c"]
