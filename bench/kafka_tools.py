"""Kafka's own programs, such as its performance tests, from the jars of Maven Central."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bench.jars import Library, fetched, java
from bench.kafka_peer import VERSION, end_with_parent

__all__ = ["Tools"]

TOOL_SECONDS = 300.0
PACKAGE = "org.apache.kafka.tools"
# As kafka-run-class.sh starts them, but compiled less: most of them live for seconds.
JVM = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Djava.awt.headless=true")
# The long ones, whose speed counts.
JVM_FAST = ("-Xmx512m", "-server", "-XX:+UseG1GC", "-Djava.awt.headless=true")


class Tools:
    """The programs of `kafka-tools`; PeerAbsent if Java or the jars are missing."""

    def __init__(self) -> None:
        self._java = java()
        self._jars = fetched(
            f"kafka-tools-{VERSION}", [Library("org.apache.kafka", "kafka-tools", VERSION)]
        )
        self._core = fetched(
            f"kafka-{VERSION}", [Library("org.apache.kafka", "kafka_2.13", VERSION)]
        )

    def command(self, name: str, *words: str, fast: bool = False) -> list[str]:
        """The command line of a program: a class of org.apache.kafka.tools, or of kafka.admin."""
        core = name.startswith("kafka.")
        program, jars = (name, self._core) if core else (f"{PACKAGE}.{name}", self._jars)
        jvm = JVM_FAST if fast else JVM
        return [self._java, *jvm, "-cp", f"{jars}/*", program, *words]

    def run(
        self, name: str, *words: str, given: str = "", fast: bool = False, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end; RuntimeError if it fails and `check` is set."""
        done = subprocess.run(
            self.command(name, *words, fast=fast),
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=TOOL_SECONDS,
            preexec_fn=end_with_parent,
        )
        if check and done.returncode:
            raise RuntimeError(
                f"{name}: {done.returncode}\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
            )
        return done

    def start(self, name: str, *words: str, output: Path) -> subprocess.Popen[bytes]:
        """Start one that runs until it is ended; what it says goes to a file."""
        with output.open("wb") as file:
            return subprocess.Popen(
                self.command(name, *words),
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
