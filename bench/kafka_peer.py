"""Apache Kafka as a peer: one node of its own on free ports.

The jars come from Maven Central. The node keeps its data in a temporary folder and ends with the
bench, also when that is interrupted or killed.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from types import TracebackType

from bench.jars import Library, fetched, java
from bench.kafka_clients import KafkaClients, kafka_client

__all__ = ["KAFKA", "VERSION", "KafkaServer", "end_with_parent", "free_ports", "kafka_client"]

VERSION = "4.3.1"
KAFKA = f"Kafka {VERSION}"
START_SECONDS = 60.0
STOP_SECONDS = 10.0
# What kafka-server-start.sh of the distribution gives the JVM.
JVM = (
    *("-Xmx1g", "-Xms1g", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
    *("-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"),
    "-Djava.awt.headless=true",
)
SETTINGS = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
num.partitions=1
"""


class KafkaServer(KafkaClients):
    """One node in KRaft mode, for the length of a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self._java = java()
        self._jars = fetched(
            f"kafka-{VERSION}", [Library("org.apache.kafka", "kafka_2.13", VERSION)]
        )
        self._folder = Path(tempfile.mkdtemp(prefix="millstream-bench-kafka-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.data = self._folder / "data"

    def __enter__(self) -> KafkaServer:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.forget()
        try:
            if self._process is not None:
                self._process.kill()
                self._process.wait(STOP_SECONDS)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The process of the server."""
        return self._process.pid if self._process is not None else 0

    def _start(self) -> None:
        port, controller = free_ports(2)
        self.bootstrap = f"127.0.0.1:{port}"
        config = self._folder / "server.properties"
        config.write_text(SETTINGS.format(port=port, controller=controller, data=self.data))
        with (self._folder / "log").open("wb") as log:
            run = [self._java, *JVM, "-cp", f"{self._jars}/*"]
            cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
            # One word, because the id may begin with a dash.
            format_ = [
                *("kafka.tools.StorageTool", "format", f"--cluster-id={cluster}"),
                *("-c", str(config)),
            ]
            if subprocess.run([*run, *format_], stdout=log, stderr=log, check=False).returncode:
                raise RuntimeError(f"Kafka's folder could not be formatted: {self._log()}")
            self._process = subprocess.Popen(
                [*run, "kafka.Kafka", str(config)],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                preexec_fn=end_with_parent,
            )
        self._await_ready()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"Kafka ended while starting: {self._log()}")
            try:
                socket.create_connection(self._address(), timeout=1).close()
                self.admin().list_topics(timeout=5)
                return
            except (OSError, self._client.KafkaException):
                time.sleep(0.2)
        raise RuntimeError(f"Kafka was not ready after {START_SECONDS:.0f} s: {self._log()}")

    def _address(self) -> tuple[str, int]:
        host, _, port = self.bootstrap.partition(":")
        return host, int(port)

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]

    def create_topic(self, *, fsync: bool, partitions: int = 1) -> str:
        """A new topic; `fsync` is a sync to disk before every ack."""
        return self.make_topic(partitions, {"flush.messages": "1"} if fsync else {})

    def bytes_on_disk(self, topic: str) -> int:
        """Of the log of a topic, without the files that Kafka allocates ahead for its indexes."""
        return sum(file.stat().st_size for file in self.data.glob(f"{topic}-*/*.log"))


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def end_with_parent() -> None:
    """In the child: be killed when the bench is gone, however it ended (Linux only)."""
    library = ctypes.CDLL(None)
    if hasattr(library, "prctl"):
        library.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
