"""The commands of messaging in this process: quick, with the exit code and the words of main."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.errors import MillstreamError

__all__ = ["Commands"]


class Commands:
    """Runs commands against one broker; nothing is asked, nothing is a terminal."""

    def __init__(self, url: str) -> None:
        self.url = url
        # A broker that is held up answers late.
        self.environment = {"NATS_URL": url, "NATS_TIMEOUT": "30s"}

    def __call__(self, *arguments: str, piped: str | bytes | None = None) -> str:
        """What the command prints; it must succeed."""
        result = CliRunner().invoke(app, arguments, input=piped, env=self.environment)
        if result.exception is not None:
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *arguments: str, piped: str | bytes | None = None) -> Any:
        return json.loads(self(*arguments, "--json", piped=piped))

    def lines(self, *arguments: str, piped: str | bytes | None = None) -> list[Any]:
        """The objects of a command that prints one a line."""
        return [json.loads(line) for line in self(*arguments, "--json", piped=piped).splitlines()]

    def partly(self, *arguments: str) -> tuple[str, str]:
        """What a command prints to stdout and stderr that left something out: exit code 1."""
        result = CliRunner().invoke(app, arguments, env=self.environment)
        assert isinstance(result.exception, SystemExit), (result.exception, result.output)
        assert result.exit_code == 1, result.output
        return result.stdout, result.stderr

    def error(self, *arguments: str, piped: str | bytes | None = None) -> str:
        """The sentence of a command that must fail."""
        result = CliRunner().invoke(app, arguments, input=piped, env=self.environment)
        assert isinstance(result.exception, MillstreamError), (result.exception, result.output)
        return str(result.exception)
