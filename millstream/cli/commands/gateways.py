"""The program that the broker runs for a gateway: DATA NODE PROTOCOL.

It serves until SIGTERM, answers what it took and ends with 0. Its keeper starts it again when it
ends, so an error is one line and an exit.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from millstream.broker.config import DEFAULT_ACCOUNT
from millstream.broker.credentials import GATEWAY
from millstream.broker.folder import NodeFolder, read_json
from millstream.broker.gateway_processes import note_listening
from millstream.cli.commands.guards import connection_settings
from millstream.cli.stopping import stopped_by_signals
from millstream.errors import ConfigError, MillstreamError
from millstream.gateways.protocols import find_protocol
from millstream.gateways.running import serve_gateway
from millstream.gateways.settings_file import make_settings
from millstream.gateways.status import GatewayStatus

__all__ = ["main"]


def main() -> None:
    """Run one gateway."""
    data, node, protocol = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="[gateway] %(message)s")
    logging.getLogger("millstream.wire").setLevel(logging.WARNING)
    try:
        asyncio.run(serve(NodeFolder(Path(data), node), protocol))
    except (MillstreamError, OSError) as error:
        sys.exit(f"[gateway] {error}")


async def serve(folder: NodeFolder, protocol: str) -> None:
    """Serve with the settings in the plan of the node, until a signal."""
    stop = stopped_by_signals()
    planned = read_json(folder.plan).get("gateways", {})
    if protocol not in planned:
        raise ConfigError(f"this broker has no {protocol} gateway any more")
    entry = find_protocol(protocol)
    settings = make_settings(entry, planned[protocol])
    who = connection_settings(folder.data, folder.name, DEFAULT_ACCOUNT, GATEWAY)

    def listening(status: GatewayStatus) -> None:
        note_listening(folder, protocol, status.address, status.advertised)

    await serve_gateway(entry, settings, who, stop, listening, data=folder.data)


if __name__ == "__main__":
    main()
