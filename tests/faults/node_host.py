"""Runs one node of a cluster and takes commands from standard input: start, kill, stop.

Each order is answered by one line of JSON. When the input ends, the node ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from millstream.broker import Broker, BrokerSettings, ClusterSettings, Role, User
from millstream.settings import Secret
from tests.faults.network import PASSWORD, PORT, ROUTE_PORT, USER


def _broker(plan: dict[str, Any]) -> Broker:
    membership = ClusterSettings(
        plan["name"],
        tuple(plan["routes"]),
        Secret("shared by the fault tests"),
        host=plan["address"],
        port=ROUTE_PORT,
    )
    return Broker(
        BrokerSettings(
            data=Path(plan["data"]) / plan["name"],
            host=plan["address"],
            port=PORT,
            users=(User(USER, Secret(PASSWORD), Role.ADMIN),),
            cluster=membership,
        )
    )


def _obey(broker: Broker, order: str) -> dict[str, Any]:
    if order == "start":
        broker.start(timeout=60.0)
        return {"pid": broker.pid}
    if order == "kill":
        broker.kill()
    elif order == "stop":
        broker.stop(grace=10.0)
    return {}


def main() -> None:
    broker = _broker(json.loads(sys.argv[1]))
    try:
        for line in sys.stdin:
            try:
                answer = _obey(broker, line.strip())
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        broker.stop(grace=5.0)


if __name__ == "__main__":
    main()
