"""The systemd unit and the container image: what they run is run here, as they run it."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cli.conftest import MILLSTREAM, Cli

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "deploy/millstream.service"
CONTAINERFILE = ROOT / "Containerfile"
INSTALLED = "/opt/millstream/bin/millstream"  # in the unit as in the image
# Of 0 to 100, as systemd rates what a service could do to the machine; 20 is "OK".
EXPOSURE_MAX = 20

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here: Debian's systemd"
)


def unit() -> configparser.ConfigParser:
    # Keys may be repeated and have capitals in systemd's files; ours repeats none.
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.read(UNIT)
    return parser


def steps(stage: str) -> dict[str, list[str]]:
    """Instruction -> what each of that kind says, of one stage of the Containerfile."""
    text = CONTAINERFILE.read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    current = ""
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            current = rest.split(" AS ")[1]
        elif current == stage and word and word != "#":
            found.setdefault(word, []).append(" ".join(rest.split()))
    return found


def pairs(words: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in words.split())


def test_the_unit_is_ready_when_the_broker_is_and_stops_cleanly(cli: Cli) -> None:
    service = unit()["Service"]
    program, *arguments = service["ExecStart"].split()
    assert program == INSTALLED
    assert service["Type"] == "notify"
    assert pairs(service["Environment"]) == {"MILLSTREAM_DATA": "/var/lib/millstream"}
    cli.environment["MILLSTREAM_DATA"] = str(cli.folder / service["StateDirectory"])
    cli.environment["MILLSTREAM_PORT"] = "0"
    cli.environment["NOTIFY_SOCKET"] = str(cli.folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(cli.environment["NOTIFY_SOCKET"])
        manager.settimeout(60)
        process = cli.start(*arguments)
        assert manager.recv(1000).startswith(b"READY=1")
        assert "fsync" in cli("status").stdout
        process.terminate()  # KillMode=mixed: only to the main process
        assert manager.recv(1000) == b"STOPPING=1"
        assert process.wait(60) == 0


@needs_systemd
def test_systemd_accepts_the_unit_and_finds_it_well_confined(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(INSTALLED, MILLSTREAM))
    checked = ["systemd-analyze", "verify", str(copy)]
    verified = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    confined = ["--offline=true", f"--threshold={EXPOSURE_MAX}", str(copy)]
    rated = subprocess.run(
        ["systemd-analyze", "security", *confined], capture_output=True, text=True, check=False
    )
    assert rated.returncode == 0, rated.stdout + rated.stderr


def test_the_unit_comes_with_the_package() -> None:
    """It is a data file of the distribution: nobody needs a clone to run a service."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    files = project["tool"]["setuptools"]["data-files"]
    assert files == {"share/millstream": ["deploy/millstream.service"]}


def test_the_image_is_built_from_files_that_exist_and_are_not_left_out() -> None:
    kept = {
        line[1:]
        for line in (ROOT / ".containerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {name for step in steps("installed")["COPY"] for name in step.split()[:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_serves_with_users_and_says_that_it_is_healthy(cli: Cli) -> None:
    broker, runtime = steps("broker"), steps("runtime")
    assert json.loads(runtime["ENTRYPOINT"][0]) == ["millstream"]
    assert broker["USER"] == ["10001:10001"], "never root"
    environment = pairs(broker["ENV"][0])
    assert environment["MILLSTREAM_DATA"] == broker["VOLUME"][0]
    data = cli.folder / "volume"
    cli.environment |= environment | {"MILLSTREAM_DATA": str(data), "MILLSTREAM_PORT": "0"}
    process = cli.start(*json.loads(broker["CMD"][0]))
    assert process.stdout is not None
    assert "users" in process.stdout.readline()
    health = json.loads(broker["HEALTHCHECK"][0].partition(" CMD ")[2])
    assert health[0] == "millstream"
    cli(*health[1:])
    assert cli.json(*health[1:])["secured"]
    process.terminate()  # STOPSIGNAL
    assert process.wait(60) == 0
    assert runtime["STOPSIGNAL"] == ["SIGTERM"]


def test_the_pipeline_image_has_java_and_runs_a_pipeline() -> None:
    pipeline = steps("pipeline")
    assert any("openjdk-17-jre-headless" in step for step in pipeline["RUN"])
    assert json.loads(pipeline["CMD"][0]) == ["pipeline", "run"]
    assert ".[schemas,spark]" in steps("installed-pipeline")["RUN"][0]


@pytest.mark.long
def test_the_image_builds_and_its_broker_runs(tmp_path: Path) -> None:
    """With buildah and a base image with Python that is on this machine, which the test names."""
    base = os.environ.get("MILLSTREAM_TEST_BASE_IMAGE")
    if shutil.which("buildah") is None or base is None:
        pytest.skip("needs buildah, and MILLSTREAM_TEST_BASE_IMAGE with the name of a local image")
    name = f"millstream-test-{os.getpid()}"
    buildah = ["buildah", "--storage-driver", "vfs"]
    isolated = ["--isolation", "chroot", "--network", "host"]
    arguments = ["--format", "docker", "--build-arg", f"PYTHON_IMAGE={base}", "-t", name, str(ROOT)]
    subprocess.run([*buildah, "bud", *isolated, *arguments], check=True)
    container = subprocess.run(
        [*buildah, "from", name], check=True, capture_output=True, text=True
    ).stdout.strip()
    try:
        # One shell: without an init process of its own, a container ends with its first command.
        script = (
            "millstream up --port 0 && millstream topic create orders && "
            "millstream pub -t orders hello && millstream topic replay orders && id -u && "
            "millstream status && millstream down"
        )
        run = [*buildah, "run", "--isolation", "chroot", container, "--", "sh", "-c", script]
        done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "hello" in done.stdout
        assert "10001" in done.stdout.splitlines()
    finally:
        subprocess.run([*buildah, "rm", container], check=False, stdout=sys.stderr)
        subprocess.run([*buildah, "rmi", name], check=False, stdout=sys.stderr)
