"""An archive of the classes that Spark's JVM loads: with one it starts in half the time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from millstream.deadline import now_ns
from millstream.errors import MissingExtra
from millstream.settings import cache_folder

__all__ = [
    "CREATE",
    "adopt_archive",
    "archive_option",
    "claim_archives",
    "new_archive",
    "package_folder",
    "spark_cache",
]

CREATE: Final = "-XX:ArchiveClassesAtExit="
USE: Final = "-XX:SharedArchiveFile="
# An archive of classes that was written this long ago is complete: writing takes some seconds.
ARCHIVE_AGE_SECONDS: Final = 60
# Every environment has one of about 170 MB, and it is unknown when an environment is removed.
ARCHIVES_MAX: Final = 4

_claims: Final[dict[Path, int]] = {}  # locks by folder: descriptors that stay open


def archive_option(java: str, quick: bool = False, given: str = "") -> str | None:
    """The option that starts the JVM from an archive of its classes, or that creates one at exit.

    Starting Spark is mostly loading classes; with an archive it takes half the time. A JVM that
    creates one takes three times as long: one process at a time does that, and never a quick one.
    Options that are `given` and name an archive win.
    """
    if CREATE in given or USE in given:
        return None
    folder, jars = spark_cache(), _jars()
    installation, name = _installation(java, jars), _name(java, jars)
    archive = _complete(folder, name)
    for new in sorted(folder.glob(f"new-{name}-*.jsa")):
        _adopt_old(new, archive)
    for stale in set(folder.glob(f"*-{installation}-*.jsa")) - set(folder.glob(f"*-{name}*.jsa")):
        stale.unlink(missing_ok=True)  # of jars that were replaced: the JVM would not use it
    if archive.exists():
        os.utime(archive)  # it is in use
        _forget_unused(folder)
        return f"{USE}{archive} -Xshare:auto"
    if quick or any(folder.glob(f"new-{name}-*.jsa")) or not claim_archives():
        return None
    return f"{CREATE}{new_archive(java)}"


def new_archive(java: str) -> Path:
    """Where a JVM of this process writes an archive; the caller has claimed the archives."""
    return spark_cache() / f"new-{_name(java, _jars())}-{os.getpid()}.jsa"


def adopt_archive(java: str) -> Path | None:
    """Use the archive of `new_archive` from now on, which is complete; None if there is none."""
    archive = _complete(spark_cache(), _name(java, _jars()))
    try:
        return new_archive(java).replace(archive)
    except FileNotFoundError:
        return None


def claim_archives() -> bool:
    """Whether this process is the one that creates archives; it stays so until it ends."""
    folder = spark_cache()
    if folder not in _claims:
        lock = os.open(folder / "making.lock", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        _claims[folder] = lock
    return True


def _installation(java: str, jars: Path) -> str:
    return hashlib.sha256(f"{java}\n{jars}".encode()).hexdigest()[:8]


def _name(java: str, jars: Path) -> str:
    """Of the files as the JVM checks them: an archive is valid only for exactly the same ones."""
    facts = sorted((jar.name, jar.stat().st_size, jar.stat().st_mtime_ns) for jar in jars.iterdir())
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    return f"{_installation(java, jars)}-{fingerprint}"


def _complete(folder: Path, name: str) -> Path:
    return folder / f"classes-{name}.jsa"


def _adopt_old(new: Path, archive: Path) -> None:
    """Use an archive that an earlier process wrote; one still being written is left alone."""
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        if now_ns() - new.stat().st_mtime_ns <= ARCHIVE_AGE_SECONDS * 1_000_000_000:
            return
        if archive.exists():
            new.unlink()  # several processes wrote one
        else:
            new.replace(archive)


def _forget_unused(folder: Path) -> None:
    """Remove the least recently used archives; a JVM that runs on one keeps it."""
    with contextlib.suppress(FileNotFoundError):  # another process is doing the same
        used = [(file.stat().st_mtime_ns, file) for file in folder.glob("*.jsa")]
        for _, file in sorted(used, reverse=True)[ARCHIVES_MAX:]:
            file.unlink()


def spark_cache() -> Path:
    """The folder for what belongs to an installation of Spark."""
    folder = cache_folder() / "spark"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def package_folder() -> Path:
    """Where PySpark is installed."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise MissingExtra("spark", "pyspark")
    # Resolved, so that environments that are links to one another share an archive of classes.
    return Path(spec.origin).resolve().parent


def _jars() -> Path:
    return package_folder() / "jars"
