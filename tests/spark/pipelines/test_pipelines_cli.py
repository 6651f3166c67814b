"""`millstream pipeline`: the commands that need no session."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.cli.exits import Exit
from millstream.cli.views.pipeline import live_table, shown_live
from millstream.errors import ConfigError, PipelineBusy, PipelineInvalid, PipelineNotRunning
from millstream.pipelines import open_project
from millstream.pipelines.state_folder import StateFolder

STATUS: dict[str, Any] = {
    "state": "running",
    "started": "2026-01-01T00:00:00+00:00",
    "flows": [
        {
            "name": "counts",
            "target": "counts",
            "kind": "table",
            "state": "restarting",
            "rows_in": 12345,
            "rows_in_per_second": 10.0,
            "rows_out": 5,
            "rows_out_per_second": 1.0,
            "lag_events": 77,
            "lag_seconds": 1.5,
            "watermark": "2026-01-01T00:00:00.000Z",
            "state_rows": 4,
            "state_bytes": 2048,
            "last_error": "ValueError: no",
            "failed_at": "2026-01-01T00:00:01+00:00",
        }
    ],
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    done = call("init", "words")
    assert done.exit_code == 0
    return tmp_path / "words"


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["pipeline", *words])


def as_json(*words: str) -> Any:
    done = call(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_ls_shows_the_flows_of_a_new_project(project: Path) -> None:
    found = as_json("ls", str(project))
    assert found["pipeline"] == "words"
    assert not found["running"]
    (flow,) = found["flows"]
    assert (flow["flow"], flow["kind"], flow["mode"], flow["state"]) == (
        "counts",
        "table",
        "update",
        "new",
    )


def test_status_of_a_pipeline_that_never_ran(project: Path) -> None:
    assert as_json("status", str(project))["state"] == "never run"
    said = "The pipeline 'words' never ran. Run it with: millstream pipeline run\n"
    assert call("status", str(project)).output == said
    with StateFolder(open_project(project)).running():
        assert as_json("status", str(project))["state"] == "starting"


def test_status_shows_rates_lag_watermark_state_and_error(project: Path) -> None:
    state = StateFolder(open_project(project))
    with state.running():
        state.write_status(STATUS)
        done = call("status", str(project))
        assert done.exit_code == Exit.UNHEALTHY
        listed = call("ls", str(project)).stdout
        assert all(words in listed for words in ("restarting", "77", "1.5 s", "pipeline.py"))
        for words in ("12,345", "77", "1.5 s", "2026-01-01T00:00:00Z", "2.0 KiB", "ValueError: no"):
            assert words in done.stdout
    done = call("status", str(project), "--json")
    assert json.loads(done.stdout)["state"] == "gone"
    assert done.exit_code == Exit.UNHEALTHY


def test_a_log_file_gets_a_line_for_each_change_of_state(
    capsys: pytest.CaptureFixture[str],
) -> None:
    moment = {**STATUS, "pipeline": "words", "time": "2026-01-01T00:00:02+00:00"}
    running = {**moment, "flows": [{**STATUS["flows"][0], "state": "running"}]}
    with shown_live(quiet=False, as_json=False) as shown:
        for status in (running, running, moment, running):
            shown(status)
    assert capsys.readouterr().out.splitlines() == [
        "2026-01-01T00:00:02+00:00 counts: running",
        "2026-01-01T00:00:02+00:00 counts: restarting: ValueError: no",
        "2026-01-01T00:00:02+00:00 counts: running",
    ]
    with shown_live(quiet=True, as_json=False) as shown:
        shown(moment)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_table_with_every_number() -> None:
    console = Console(width=240, file=io.StringIO(), force_terminal=False)
    console.print(live_table({**STATUS, "pipeline": "words"}))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("words: running", "table counts", "12,345", "77", "1.5 s", "4 (2.0 KiB)"):
        assert words in printed


def test_stop_and_run_report_which_process_runs_it(project: Path) -> None:
    with pytest.raises(PipelineNotRunning):
        _raise(call("stop", str(project)))
    with StateFolder(open_project(project)).running(), pytest.raises(PipelineBusy):
        _raise(call("run", str(project)))


def _raise(done: Any) -> None:
    assert done.exit_code != 0
    raise done.exception


def test_reset_asks_and_names_what_will_happen(project: Path) -> None:
    checkpoint = project / ".pipeline" / "checkpoints" / "counts"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"written to counts a second time.*--yes"):
        _raise(call("reset", str(project)))
    assert checkpoint.exists()
    with (project / "pipeline.py").open("a") as file:
        file.write("mp.sink('base', 'noop')\n@mp.flow('base')\ndef copied(): ...\n")
    kept = r"of counts are removed\. Their results are written to base a second time\."
    with pytest.raises(ConfigError, match=kept):
        _raise(call("reset", str(project), "--empty-outputs"))
    with pytest.raises(ConfigError, match="no flow 'nope'"):
        _raise(call("reset", str(project), "--flow", "nope", "--yes"))
    found = as_json("reset", str(project), "--yes")
    assert found["flows"] == ["counts", "copied"]
    assert not checkpoint.exists()
    assert Path(found["checkpoints"][0]).exists()


def test_package_holds_the_project_and_the_package(project: Path, tmp_path: Path) -> None:
    found = as_json("package", str(project), "-o", str(tmp_path / "dist"))
    main, archive = (Path(name) for name in found["files"])
    compile(main.read_text(), str(main), "exec")
    names = set(zipfile.ZipFile(archive).namelist())
    assert {
        "millstream/__init__.py",
        "millstream/spark/datasource.py",
        "millstream_project/pipeline.py",
        "millstream_project/millstream.toml",
    } <= names
    first = archive.read_bytes()
    as_json("package", str(project), "-o", str(tmp_path / "dist"))
    assert archive.read_bytes() == first


def test_a_project_that_does_not_load_is_refused_everywhere(project: Path) -> None:
    (project / "pipeline.py").write_text("1 / 0")
    for command in ("ls", "package", "reset"):
        with pytest.raises(PipelineInvalid, match="ZeroDivisionError"):
            _raise(call(command, str(project)))
    (project / "pipeline.py").write_text("import sys\nsys.exit(0)")
    with pytest.raises(PipelineInvalid, match=r"pipeline.py does not load: it ends .* line 2$"):
        _raise(call("ls", str(project)))
