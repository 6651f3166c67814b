"""The program that the broker runs to guard an account's topics: DATA NODE ACCOUNT.

It serves until SIGTERM, then answers what it took and ends. Its keeper starts it again when it
ends for another reason, so an error is one line and an exit.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import Final

from millstream.broker.credentials import GUARD, read_credentials
from millstream.broker.folder import NodeFolder, read_json
from millstream.errors import MillstreamError
from millstream.mill import connect
from millstream.schemas.registry.guards import Guards
from millstream.settings import ConnectionSettings, Reconnect, Tls

__all__ = ["main"]

# Beyond this without a connection the keeper starts it again, with the present credentials.
RECONNECT_SECONDS: Final = 30.0


def main() -> None:
    """Run the guards of one account."""
    data, node, account = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="[guard] %(message)s")
    logging.getLogger("millstream.wire").setLevel(logging.WARNING)
    try:
        asyncio.run(serve(connection_settings(Path(data), node, account)))
    except (MillstreamError, OSError) as error:
        sys.exit(f"[guard] {error}")


def connection_settings(
    data: Path, node: str, account: str, role: str = GUARD
) -> ConnectionSettings:
    """How to connect to the node, as the user that the broker made for the guard or a gateway."""
    plan = read_json(NodeFolder(data, node).plan)
    who = read_credentials(data, role, account)
    tls = plan.get("client_tls")
    return ConnectionSettings(
        urls=(str(plan["url"]),),
        name=f"millstream {role} of {account}",
        user=who.user,
        password=who.password,
        tls=None if tls is None else Tls(**tls),
        reconnect=Reconnect(give_up_after=RECONNECT_SECONDS),
    )


async def serve(settings: ConnectionSettings) -> None:
    """Guard the account's topics until SIGTERM, or until the connection is lost for good."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    loop.add_signal_handler(signal.SIGINT, stopped.set)
    async with connect(settings=settings) as mill, Guards(mill) as guards:
        mill.connection.on_closed.append(stopped.set)
        work = asyncio.create_task(guards.run())
        asked = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, asked):
                task.cancel()
            ended = await asyncio.gather(work, asked, return_exceptions=True)
    if isinstance(ended[0], Exception):
        raise ended[0]


if __name__ == "__main__":
    main()
