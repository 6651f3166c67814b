"""Java libraries that the bench needs, fetched by Maven once and kept in the user's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.harness import PeerAbsent

__all__ = ["Library", "fetched"]

FETCH_SECONDS = 600
CACHE = Path("~/.cache/millstream-bench").expanduser()


class Library(NamedTuple):
    """A library of Maven Central; `alone` leaves out what it depends on."""

    group: str
    artifact: str
    version: str
    alone: bool = False

    def xml(self) -> str:
        """Its lines of a project file."""
        without = "<exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion>"
        return (
            f"<dependency><groupId>{self.group}</groupId><artifactId>{self.artifact}</artifactId>"
            f"<version>{self.version}</version>"
            f"{f'<exclusions>{without}</exclusions>' if self.alone else ''}</dependency>"
        )


def fetched(name: str, libraries: Sequence[Library]) -> Path:
    """The folder with the jars of these libraries; PeerAbsent if they cannot be fetched."""
    folder = CACHE / name
    if folder.is_dir():
        return folder
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            raise PeerAbsent(f"'{tool}' is not installed; it is needed to fetch and run {name}")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        Path(work, "pom.xml").write_text(
            '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
            "<groupId>bench</groupId><artifactId>bench</artifactId><version>1</version>"
            f"<dependencies>{''.join(one.xml() for one in libraries)}</dependencies></project>"
        )
        command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars"]
        done = subprocess.run(
            command, cwd=work, capture_output=True, text=True, check=False, timeout=FETCH_SECONDS
        )
        if done.returncode or not list(Path(work, "jars").glob("*.jar")):
            raise PeerAbsent(f"Maven could not fetch {name}: {done.stdout[-300:].strip()}")
        try:
            # The whole folder at once, so that an interrupted run leaves no half of it.
            Path(work, "jars").rename(folder)
        except OSError:
            if not folder.is_dir():  # another run was faster
                raise
    return folder


def java() -> str:
    """The interpreter that JAVA_HOME names, or else that of the path."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home, "bin"))) if home else None
    found = found or shutil.which("java")
    if found is None:
        raise PeerAbsent("'java' is not installed")
    return found
