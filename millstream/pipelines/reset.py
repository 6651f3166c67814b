"""Beginning anew: which flows, and what becomes of what they wrote."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from millstream.errors import ConfigError, TopicNotFound
from millstream.pipelines.declare import Pipeline
from millstream.pipelines.project import Project
from millstream.pipelines.targets import Broker

__all__ = ["chosen_flows", "empty"]


def chosen_flows(pipeline: Pipeline, names: Sequence[str]) -> list[str]:
    """The flows of these names; all when none is given."""
    for name in names:
        if name not in pipeline.flows:
            raise ConfigError(
                f"there is no flow '{name}'; the pipeline has {', '.join(pipeline.flows)}"
            )
    return list(names) or list(pipeline.flows)


def empty(
    project: Project, pipeline: Pipeline, outputs: Sequence[str], url: str | None
) -> list[str]:
    """Remove what is in topics, tables and folders of files; the names of what was emptied."""
    done = []
    with Broker(url) as broker:
        for name in outputs:
            output = pipeline.outputs[name]
            if output.kind == "files":
                folder = project.folder / output.options["path"]
                if folder.is_dir():
                    shutil.rmtree(folder)
                    done.append(name)
            elif output.kind in ("topic", "table"):
                try:
                    broker.mill.topic(name).purge()
                    done.append(name)
                except TopicNotFound:
                    continue  # the flow never ran
    return done
