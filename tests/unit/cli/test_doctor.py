"""Each check finds its problem and explains how to fix it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from millstream.cli.commands import doctor
from millstream.cli.commands.doctor import Check


def checks(folder: Path, port: int = 0) -> dict[str, Check]:
    return {check.name: check for check in doctor.run_checks(folder, port)}


def test_everything_is_checked_and_a_problem_has_a_fix(tmp_path: Path) -> None:
    found = checks(tmp_path / "data")
    assert list(found) == ["python", "java", "server", "ports", "disk", "clock"]
    for check in found.values():
        assert check.found
        assert check.state == "ok" or check.fix
    assert not (tmp_path / "data").exists()
    assert list(tmp_path.iterdir()) == []


def test_missing_java_is_only_a_warning_with_the_command_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    java = checks(tmp_path)["java"]
    assert java.state == "warning"
    assert "Java 17" in (java.fix or "")


def test_an_old_java_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bin" / "java"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    java = checks(tmp_path)["java"]
    assert java.state == "warning"
    assert "Java 11" in java.found


def test_a_java_that_does_not_answer_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "java"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec sleep 600\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr("millstream.cli.commands.doctor.JAVA_SECONDS", 0.1)
    java = checks(tmp_path)["java"]
    assert java.state == "warning"
    assert "does not report its version" in java.found


def test_a_missing_server_explains_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_SERVER_BIN", str(tmp_path / "nowhere"))
    server = checks(tmp_path)["server"]
    assert server.state == "failed"
    assert "NATS_SERVER_BIN" in (server.fix or "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert checks(tmp_path)["disk"].state == "failed"


def test_a_full_or_slow_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISK_FREE", 1 << 62)
    assert checks(tmp_path)["disk"].state == "failed"
    monkeypatch.setattr(doctor, "DISK_FREE", 0)
    monkeypatch.setattr(doctor, "FSYNC_SLOW", 0.0)
    assert checks(tmp_path)["disk"].state == "warning"


def test_an_impossible_clock_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "now_ns", lambda: 10**9)
    clock = checks(tmp_path)["clock"]
    assert clock.state == "failed"
    assert "1970" in clock.found


def test_a_clock_without_a_time_server_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_clock_is_synchronised", lambda: False)
    assert checks(tmp_path)["clock"].state == "warning"
    monkeypatch.setattr(doctor, "_clock_is_synchronised", lambda: True)
    assert checks(tmp_path)["clock"].state == "ok"
