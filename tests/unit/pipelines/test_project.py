"""Projects: their settings, their files, and the errors for wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.errors import ConfigError, PipelineInvalid
from millstream.pipelines import load, open_project
from millstream.pipelines.launch import broker_options
from millstream.pipelines.template import write_template

FLOW = "from millstream import pipelines as mp\n@mp.topic\ndef a(): ...\n"


def project(folder: Path, toml: str = "[pipeline]\n", **files: str) -> Path:
    (folder / "millstream.toml").write_text(toml)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_settings_are_read(tmp_path: Path) -> None:
    toml = """
[pipeline]
name = "orders"
trigger = "2s"
restarts = 3
checkpoints = "s3a://bucket/x/"
[pipeline.spark]
"spark.driver.memory" = "2g"
sql.shuffle.partitions = 4
ui.enabled = true
"""
    found = open_project(project(tmp_path, toml, a=FLOW))
    assert (found.name, found.trigger, found.restarts) == ("orders", 2.0, 3)
    assert found.checkpoints == "s3a://bucket/x"
    assert found.spark == {
        "spark.driver.memory": "2g",
        "spark.sql.shuffle.partitions": "4",
        "spark.ui.enabled": "true",
    }


def test_the_default_name_is_that_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my flights"
    folder.mkdir()
    found = open_project(project(folder, a=FLOW))
    assert found.name == "my-flights"
    assert found.checkpoints == str(folder / ".pipeline" / "checkpoints")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[pipeline]\nnmae = "x"', r"no setting 'nmae'"),
        ("[pipeline]\nrestarts = -1", "restarts must be a whole number"),
        ('[pipeline]\nprune = "no"', "prune is true or false"),
        ('[pipeline]\nfiles = "*.py"', "files must be a list"),
        ('[pipeline]\ntrigger = "soon"', "trigger: not a duration"),
        ('[pipeline]\ntrigger = "7"', "Write 7s for seconds"),
        ("[pipeline]\ntrigger = 7", "Write 7s for seconds"),
        ('[pipeline]\nstate_store = "disk"', "memory or rocksdb"),
        ('[pipeline]\nname = "a b"', "use up to 64 letters"),
        ("pipeline = 3", r"must be a table"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_project(project(tmp_path, toml))


def test_a_folder_without_a_project_is_refused_with_how_to_create_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="millstream pipeline init"):
        open_project(tmp_path)


def test_files_are_loaded_in_order_and_can_import_each_other(tmp_path: Path) -> None:
    second = "from shared_names import NAME\n" + FLOW.replace("@mp.topic", "@mp.topic(name=NAME)")
    toml = '[pipeline]\nfiles = ["p_*.py"]\n'
    folder = project(tmp_path, toml, p_a=FLOW, p_b=second, shared_names='NAME = "bee"\n')
    assert list(load(open_project(folder)).outputs) == ["a", "bee"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", r"a.py does not load: ZeroDivisionError at line 1"),
        ("x = 1\ndef (:", r"a.py does not load: SyntaxError at line 2"),
        ("x = 1", "declares no flow"),
        (FLOW + FLOW, "declared twice"),
    ],
)
def test_a_file_that_does_not_load_is_named_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(PipelineInvalid, match=message):
        load(open_project(project(tmp_path, a=text)))


def test_an_empty_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineInvalid, match="no Python files"):
        load(open_project(project(tmp_path)))


def test_init_writes_a_project_that_loads(tmp_path: Path) -> None:
    (tmp_path / "first" / ".millstream").mkdir(parents=True)  # 'millstream up' ran there before
    write_template(tmp_path / "first")
    found = load(open_project(tmp_path / "first"))
    assert list(found.flows) == ["counts"]
    with pytest.raises(ConfigError, match="not empty"):
        write_template(tmp_path / "first")
    with pytest.raises(ConfigError, match="is a file"):
        write_template(tmp_path / "first" / "pipeline.py")


NEEDS_SESSION = """
from pathlib import Path
from pyspark.errors import PySparkRuntimeError
from millstream import pipelines as mp

@mp.topic
def b(): ...

with Path({log!r}).open("a") as log:
    log.write("b")
if not Path({started!r}).exists():
    raise PySparkRuntimeError(errorClass="SESSION_OR_CONTEXT_NOT_EXISTS", messageParameters={{}})
"""


def test_a_file_that_needs_a_session_is_run_again_with_one_and_no_other_file_is(
    tmp_path: Path,
) -> None:
    log, started = tmp_path / "log", tmp_path / "started"
    first = FLOW + f"with open({str(log)!r}, 'a') as log: log.write('a')\n"
    second = NEEDS_SESSION.format(log=str(log), started=str(started))
    found = load(open_project(project(tmp_path, a=first, b=second)), started.touch)
    assert list(found.flows) == ["a", "b"]
    assert log.read_text() == "abb"


def test_a_file_that_is_run_again_keeps_what_its_imports_declare(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "shared_part.py").write_text(FLOW)
    log, started = tmp_path / "log", tmp_path / "started"
    text = "import parts.shared_part\n" + NEEDS_SESSION.format(log=str(log), started=str(started))
    found = load(open_project(project(tmp_path, b=text)), started.touch)
    assert list(found.flows) == ["a", "b"]


def test_installed_packages_are_not_loaded_twice_for_a_file_that_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    log, started = tmp_path / "log", tmp_path / "started"
    (installed / "installed_once.py").write_text(
        f"with open({str(log)!r}, 'a') as log: log.write('i')\n"
    )
    monkeypatch.syspath_prepend(str(installed))
    text = "import installed_once\n" + NEEDS_SESSION.format(log=str(log), started=str(started))
    load(open_project(project(tmp_path, b=text)), started.touch)
    assert log.read_text() == "ibb"


def test_a_session_that_is_still_missing_is_an_error_of_the_file(tmp_path: Path) -> None:
    text = NEEDS_SESSION.format(log=str(tmp_path / "log"), started=str(tmp_path / "started"))
    with pytest.raises(PipelineInvalid, match=r"b.py does not load: PySparkRuntimeError at line"):
        load(open_project(project(tmp_path, b=text)), lambda: None)


def test_an_assertion_of_the_project_itself_starts_no_session(tmp_path: Path) -> None:
    started = tmp_path / "started"
    text = "import pyspark.sql\nassert 1 == 2, 'no'\n" + FLOW
    with pytest.raises(PipelineInvalid, match=r"AssertionError at line 2: no"):
        load(open_project(project(tmp_path, a=text)), started.touch)
    assert not started.exists()


def test_the_broker_is_looked_up_from_the_folder_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NATS_URL", raising=False)
    folder = tmp_path / "project"
    folder.mkdir()
    found = open_project(project(folder, 'url = "nats://listed:1"\n[pipeline]\n', a=FLOW))
    monkeypatch.chdir(tmp_path)
    assert broker_options(found) == {"url": "nats://listed:1"}
    assert broker_options(found, "nats://given:2") == {"url": "nats://given:2"}
    monkeypatch.setenv("NATS_URL", "nats://variable:3")
    assert broker_options(found) == {}
