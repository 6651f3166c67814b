"""A Spark session with the settings that proved to matter; any other session works as well."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.errors import ConfigError, MissingExtra
from millstream.settings import environment, export_environment
from millstream.spark.class_archive import archive_option, package_folder, spark_cache
from millstream.spark.jvm import start_jvm
from millstream.spark.worker_python import told_to_spark, worker_python

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

__all__ = [
    "QUICK_COMPILER",
    "check_pyspark",
    "java_version",
    "own_session",
    "session",
    "session_settings",
    "start_java",
]

JAVA_VERSION_MIN: Final = 17
SOURCE_MODULE: Final = "pyspark_millstream"
# How many times a task is tried; in local mode Spark would give up after the first failure.
TASK_TRIES: Final = 4

QUICK_COMPILER: Final = "-XX:TieredStopAtLevel=1"  # for processes that run for minutes only
# Hadoop runs chmod for every file that it creates, two in each batch and more with state. Java's
# other way to start a program starts two, which takes three times as long.
VFORK: Final = "-Djdk.lang.Process.launchMechanism=VFORK"
VFORK_VERSION_MAX: Final = 21  # later ones are about to drop it
COLLECTOR: Final = "-XX:+UseParallelGC"
# Where else Spark's JVM takes options from; with two collectors it does not start.
_VARIABLES: Final = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
_LOG_PROPERTY: Final = "millstream.log"
STATE_STORE: Final = "spark.sql.streaming.stateStore.providerClass"

# Without a level of its own, the logger of PySpark's JVM sets that of all others, and says so.
_LOG4J: Final = """\
status = off
rootLogger.level = error
rootLogger.appenderRef.own.ref = own
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
appender.own.name = own
appender.own.layout.type = PatternLayout
"""
_LOG4J_STDERR: Final = f"""{_LOG4J}\
appender.own.type = Console
appender.own.target = SYSTEM_ERR
appender.own.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n
"""
_LOG4J_FILE: Final = f"""{_LOG4J}\
appender.own.type = RollingFile
appender.own.createOnDemand = true
appender.own.fileName = ${{sys:{_LOG_PROPERTY}}}
appender.own.filePattern = ${{sys:{_LOG_PROPERTY}}}.%i
appender.own.layout.pattern = %d{{ISO8601}} %p %c{{1}}: %m%n
appender.own.policies.type = Policies
appender.own.policies.size.type = SizeBasedTriggeringPolicy
appender.own.policies.size.size = 10MB
appender.own.strategy.type = DefaultRolloverStrategy
appender.own.strategy.max = 1
"""


def session(
    app: str = "millstream",
    *,
    master: str | None = None,
    quick: bool = False,
    ui: bool = False,
    log: Path | None = None,
    conf: dict[str, str] | None = None,
) -> SparkSession:
    """A session with settings for fast reading and writing of topics.

    `master` is Spark's (default: all cores of this machine). `quick` starts sooner and runs hot
    code more slowly, which suits tests. Spark's errors go to stderr, or to the file `log`. `conf`
    has further Spark settings, which override ours. If this process has an active session, it is
    returned unchanged.
    """
    check_pyspark()
    local = _master(master).startswith("local")
    python = worker_python(local) if _current() is None else sys.executable
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    java = java_version()
    export_environment(SPARK_HOME=str(_spark_home()))
    # These print every failed analysis as JSON, in addition to the exception itself.
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    settings = {"spark.app.name": app, "spark.master": _master(master)}
    settings |= session_settings(_master(master), ui=ui)
    given = dict(conf or {})
    if "RocksDB" in given.get(STATE_STORE, ""):
        # Its snapshots work only with Hadoop's own local file system.
        given.setdefault("spark.hadoop.fs.file.impl", "org.apache.hadoop.fs.LocalFileSystem")
    options = given.pop("spark.driver.extraJavaOptions", "")
    quick = quick or QUICK_COMPILER in options
    own = f"{_java_options(java, quick, log, options)} {_collector(options)}"
    settings |= {"spark.driver.extraJavaOptions": f"{own} {options}".strip(), **given}
    with told_to_spark(python):
        start_jvm(SparkConf(loadDefaults=False).setAll(list(settings.items())))
        created: SparkSession = SparkSession.builder.config(map={**settings}).getOrCreate()
    _register(created)
    return created


def check_pyspark() -> None:
    """Raise MissingExtra if PySpark is not installed."""
    if find_spec("pyspark") is None:
        raise MissingExtra("spark", "pyspark")


@contextmanager
def own_session() -> Iterator[None]:
    """Stop a session that was started in here at the end; one that was there before stays.

    A process that ends without stopping it leaves Spark's threads and workers calling closed
    sockets, and each prints a trace. Stopping first hands over what listeners are still to hear.
    """
    before = _current()
    try:
        yield
    finally:
        created = _current()
        if created is not None and created is not before:
            created.stop()


def _current() -> SparkContext | None:
    if "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext

    return SparkContext._active_spark_context


def start_java() -> None:
    """Start Spark's JVM without a session, for what needs only the JVM, such as the SQL parser.

    Nothing happens if this process has a JVM. A later session runs in this one.
    """
    check_pyspark()
    from pyspark import SparkConf, SparkContext

    if SparkContext._gateway is None:
        java = java_version()
        export_environment(PYSPARK_PYTHON=sys.executable, SPARK_HOME=str(_spark_home()))
        conf = SparkConf(loadDefaults=False)
        conf.set("spark.driver.extraJavaOptions", _java_options(java, quick=True))
        start_jvm(conf)


def _register(session: SparkSession) -> None:
    """Register the source if Spark cannot find it automatically.

    Spark's workers list the modules on their path; an editable install, or one that is only on
    this process's path, is not in that list.
    """
    found = find_spec(SOURCE_MODULE)
    folder = None if found is None or found.origin is None else Path(found.origin).parent
    if folder != Path(sysconfig.get_path("purelib")):
        from millstream.spark.datasource import MillstreamDataSource

        session.dataSource.register(MillstreamDataSource)


def _master(given: str | None) -> str:
    master = given or "local[*]"
    cores = re.fullmatch(r"local(?:\[(\*|\d+)\])?", master)
    return f"local[{cores[1] or 1},{TASK_TRIES}]" if cores else master


def session_settings(master: str, *, ui: bool = False) -> dict[str, str]:
    """The settings, for sessions created elsewhere (`spark-defaults.conf`, `--conf`)."""
    settings = {
        # Without it every exchange with a Python worker waits about 45 ms.
        "spark.python.unix.domain.socket.enabled": "true",
        # Saves two renames and a checksum file in each step of a checkpoint: 60 ms a batch.
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.checkpointing."
            "FileSystemBasedCheckpointFileManager"
        ),
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
        # Batch reads skip what their filters exclude.
        "spark.sql.python.filterPushdown.enabled": "true",
        # The same tasks when a batch is run again: the sink's guarantee depends on it.
        "spark.sql.adaptive.streaming.stateless.enabled": "false",
        "spark.ui.enabled": str(ui).lower(),
        "spark.ui.showConsoleProgress": "false",
    }
    local = re.match(r"local\[(\*|\d+)", master)
    if local:
        cores = os.cpu_count() or 1 if local[1] == "*" else int(local[1])
        settings["spark.sql.shuffle.partitions"] = str(cores)
        settings["spark.driver.host"] = "127.0.0.1"
        settings["spark.driver.bindAddress"] = "127.0.0.1"
    return settings


# -- Java -----------------------------------------------------------------------------------


def java_version() -> str:
    """The version of the Java that Spark will start; a ConfigError if there is none."""
    home = environment("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    advice = (
        "Install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew install "
        "openjdk@17) or point JAVA_HOME at it"
    )
    if program is None:
        raise ConfigError(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer, and none was found. {advice}"
        )
    try:
        # On a machine that starts several JVMs at the same time one takes half a minute.
        done = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=120, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer, and {program} does not start: {error}. "
            f"{advice}"
        ) from error
    found = re.search(r'version "(\d+)([^"]*)"', done.stderr)
    if found is None or int(found[1]) < JAVA_VERSION_MIN:
        first = (done.stderr.splitlines() or ["nothing"])[0]
        raise ConfigError(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer; {program} says: {first}. {advice}"
        )
    return f"{found[1]}{found[2]}"


def _java_options(java: str, quick: bool, log: Path | None = None, given: str = "") -> str:
    # Creating an archive logs hundreds of classes that cannot go into it.
    options = ["-Xlog:disable", f"-Dlog4j2.configurationFile={_log_settings(log).as_uri()}"]
    if log is not None:
        options.append(f'"-D{_LOG_PROPERTY}={log}"')
    if quick:
        options.append(QUICK_COMPILER)
    if sys.platform == "linux" and int(re.split(r"\D", java)[0]) <= VFORK_VERSION_MAX:
        options.append(VFORK)
    archive = archive_option(java, quick, given)
    if archive is not None:
        options.append(archive)
    return " ".join(options)


def _collector(options: str) -> str:
    """The garbage collector that slows down code least, unless another one is chosen.

    Java's own choice has an expensive write barrier, for short pauses in large heaps.
    """
    given = [options, *(environment(name) or "" for name in _VARIABLES)]
    chosen = any(re.search(r"-XX:[+-]Use\w+GC\b", text) for text in given)
    return "" if chosen else COLLECTOR


def _log_settings(log: Path | None) -> Path:
    text = _LOG4J_STDERR if log is None else _LOG4J_FILE
    file = spark_cache() / f"log4j2-{'stderr' if log is None else 'file'}.properties"
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.replace(file)
    return file


def _spark_home() -> Path:
    """A home for Spark without its zipped Python, so that workers use the installed package.

    A zip has no compiled modules: importing from it takes each worker four times as long.
    """
    package = package_folder()
    home = spark_cache() / f"home-{hashlib.sha256(str(package).encode()).hexdigest()[:16]}"
    home.mkdir(exist_ok=True)
    for name in ("bin", "jars", "sbin"):
        link = home / name
        if not link.is_symlink():
            try:
                link.symlink_to(package / name, target_is_directory=True)
            except FileExistsError:
                continue  # another process created it in the meantime
    return home
