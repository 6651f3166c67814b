"""Resets flows, so that they start from scratch, and empties their outputs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from millstream.errors import ConfigError, TopicNotFound
from millstream.pipelines.declare import Output, Pipeline
from millstream.pipelines.outputs import PipelineTopics
from millstream.pipelines.project import Project
from millstream.pipelines.state_folder import StateFolder

__all__ = ["chosen_flows", "reset_flows"]


def chosen_flows(pipeline: Pipeline, names: Sequence[str]) -> list[str]:
    """The flows of these names; all when none is given."""
    for name in names:
        if name not in pipeline.flows:
            raise ConfigError(
                f"there is no flow '{name}'; the pipeline has {', '.join(pipeline.flows)}"
            )
    return list(names) or list(pipeline.flows)


def reset_flows(
    project: Project, pipeline: Pipeline, flows: Sequence[str], *, topics: PipelineTopics | None
) -> tuple[list[Path], list[str]]:
    """Move the flows' checkpoints away; with `topics`, also remove what the flows wrote.

    Nothing is changed while the pipeline runs or the broker cannot be reached. Returns where the
    old checkpoints are now, and the names of the outputs that were emptied.
    """
    state = StateFolder(project)
    with state.idle():
        if topics is None:
            return state.reset(flows), []
        topics.check_reachable()
        # In this order: if interrupted in between, the same command does the rest. The other way
        # round, a run in between would not write the removed results again.
        moved = state.reset(flows)
        outputs = {pipeline.flows[name].target for name in flows}
        return moved, _empty(project, [pipeline.outputs[name] for name in sorted(outputs)], topics)


def _empty(project: Project, outputs: Sequence[Output], topics: PipelineTopics) -> list[str]:
    """Empty topics, tables and folders of files; sinks and PostgreSQL are left alone."""
    done = []
    for output in outputs:
        if output.kind == "files":
            folder = project.folder / output.options["path"]
            if folder.is_dir():
                shutil.rmtree(folder)
                done.append(output.name)
        elif output.kind in ("topic", "table"):
            try:
                topics.mill.topic(output.name).admin.purge()
                done.append(output.name)
            except TopicNotFound:
                continue  # the flow never ran
    return done
