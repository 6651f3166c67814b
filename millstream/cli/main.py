"""The `millstream` command: runs a command and turns errors into messages and exit codes."""

from __future__ import annotations

import sys

from millstream.cli.exits import Exit
from millstream.errors import (
    CaptureNotRunning,
    ConnectFailed,
    GatewayNotRunning,
    MillstreamError,
    NotRunning,
    TlsFailed,
)

__all__ = ["main"]


def main() -> None:
    """Run the command line; a known error is one sentence on stderr, never a traceback."""
    try:
        # Loaded here, so that Ctrl-C is as quiet while loading as it is later.
        from millstream.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    except TlsFailed as error:  # it runs, and trying again would not help
        _fail(str(error), Exit.ERROR)
    except (NotRunning, CaptureNotRunning, GatewayNotRunning, ConnectFailed) as error:
        _fail(str(error), Exit.NOT_RUNNING)
    except MillstreamError as error:
        _fail(str(error), Exit.ERROR)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{where}", Exit.ERROR)


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(code)
