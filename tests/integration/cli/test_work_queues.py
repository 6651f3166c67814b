"""tail, export and verify look into a work queue and take nothing from it."""

from __future__ import annotations

from pathlib import Path

from tests.integration.cli.messaging_commands import Commands


def test_the_commands_that_look_work_on_a_work_queue(millstream_url: str, tmp_path: Path) -> None:
    run = Commands(millstream_url)
    run("topic", "create", "jobs", "--retention", "workqueue")
    for number in range(3):
        run("pub", "-t", "jobs", str(number), "--key", "k")
    tail = run.lines("topic", "tail", "jobs", "--offset", "beginning", "--exit")
    assert [event["value"] for event in tail] == ["0", "1", "2"]
    file = tmp_path / "jobs.jsonl"
    run("export", "jobs", str(file))
    assert len(file.read_text().splitlines()) == 3
    run("verify", "jobs")
    assert run.json("topic", "info", "jobs")["messages"] == 3
