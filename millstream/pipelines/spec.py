"""`spark-pipeline.yml`: the file that makes a folder a project of Spark Declarative Pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from millstream.errors import ConfigError, MissingExtra

__all__ = ["SPEC_FILES", "Spec", "read_spec", "spec_file"]

SPEC_FILES: Final = ("spark-pipeline.yml", "spark-pipeline.yaml")
_FIELDS: Final = frozenset(
    {"name", "storage", "catalog", "database", "schema", "configuration", "libraries"}
)


@dataclass(frozen=True, slots=True)
class Spec:
    """The settings of a spark-pipeline.yml that are used here."""

    name: str | None
    spark: Mapping[str, str]  # settings of the session
    patterns: tuple[str, ...]  # of the Python and SQL files, relative to the folder


def spec_file(folder: Path) -> Path | None:
    """The spec in a folder, if it has one."""
    found = [folder / name for name in SPEC_FILES if (folder / name).is_file()]
    return found[0] if found else None


def read_spec(path: Path) -> Spec:
    """The settings in a spec; unknown ones are refused."""
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra("spark", "pyyaml") from error
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path} is not a table of settings")
    unknown = sorted(set(found) - _FIELDS)
    if unknown:
        raise ConfigError(f"{path}: there is no setting '{unknown[0]}'")
    spark = found.get("configuration") or {}
    if not isinstance(spark, Mapping):
        raise ConfigError(f"{path}: configuration must be a table of Spark settings")
    return Spec(
        name=None if found.get("name") is None else str(found["name"]),
        spark={str(key): str(value) for key, value in spark.items()},
        patterns=tuple(_pattern(entry, path) for entry in found.get("libraries") or []),
    )


def _pattern(entry: Any, path: Path) -> str:
    try:
        pattern = str(entry["glob"]["include"])
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: write each entry of libraries as - glob: {{include: ...}}"
        ) from error
    return f"{pattern}/*" if pattern.endswith("/**") else pattern
