"""What the workers of a process share."""

from __future__ import annotations

import asyncio

from millstream.failure_log import check_handler
from millstream.messaging.processing.settings import ProcessParts, ProcessSettings, Transform

__all__ = ["Work"]


class Work:
    """The function, what it is applied to, and how far it is."""

    def __init__(self, parts: ProcessParts, function: Transform, settings: ProcessSettings) -> None:
        check_handler(function)
        self.parts = parts
        self.function = function
        self.settings = settings
        self.stopping = asyncio.Event()
        self.handled = 0  # events the function was called for
        self.produced = 0  # outputs stored

    @property
    def several_inputs(self) -> bool:
        """Whether events of more than one topic are read."""
        return len({partition.topic for partition in self.parts.inputs}) > 1
