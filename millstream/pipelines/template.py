"""The project that `millstream pipeline init` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from millstream.errors import ConfigError
from millstream.pipelines.declare import check_name
from millstream.settings import DATA_FOLDER

__all__ = ["write_template"]

_TOML: Final = """\
[pipeline]
name = "{name}"
# files = ["*.py"]                  # what declares the pipeline
# trigger = "1s"                    # pause between batches; default: none
# master = "local[*]"               # or spark://host:7077
# restarts = 5                      # in a row, before a failing flow stays stopped
# checkpoints = "s3a://bucket/{name}" # on a cluster: where every node can reach it

# [pipeline.spark]
# "spark.driver.memory" = "2g"
"""

_PYTHON: Final = '''\
"""A first pipeline: counts words as they arrive.

Give it something to read:

    millstream topic create lines
    millstream pub -t lines "to be or not to be"
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from millstream import pipelines as mp


@mp.view
def words() -> DataFrame:
    text = f.lower(f.col("value").cast("string"))
    word = f.explode(f.split(text, "[^a-z]+")).alias("word")
    return mp.read("lines").select(word).where("word <> ''")


@mp.table(key="word")
def counts() -> DataFrame:
    """The count of each word; a table holds the latest value of each key."""
    return mp.read("words").groupBy("word").agg(f.count("*").alias("times"))
'''


def write_template(folder: Path) -> list[Path]:
    """Write a project into a new folder, or one that has at most a broker; returns the files."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a new folder")
    if folder.exists() and any(path.name != DATA_FOLDER for path in folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name a new folder")
    name = check_name("pipeline", folder.resolve().name)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for file, text in (
        ("millstream.toml", _TOML.format(name=name)),
        ("pipeline.py", _PYTHON),
        (".gitignore", ".pipeline/\n.millstream/\n"),
    ):
        path = folder / file
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
