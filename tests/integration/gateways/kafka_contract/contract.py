"""The contract: behaviours, clients, and what real Kafka did.

`python -m tests.integration.gateways.kafka_contract.contract` starts a real Kafka and writes what
its clients observe to observed.json; with `--server HOST:PORT` another server is compared with it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from bench.kafka_peer import KafkaServer
from tests.integration.gateways.kafka_contract import (  # noqa: F401 -- they register themselves
    data_behaviours,
    group_behaviours,
    topic_behaviours,
)
from tests.integration.gateways.kafka_contract.aiokafka_face import AioKafka
from tests.integration.gateways.kafka_contract.behaviours import BEHAVIOURS
from tests.integration.gateways.kafka_contract.confluent_face import Confluent
from tests.integration.gateways.kafka_contract.differences import Refusal, expected
from tests.integration.gateways.kafka_contract.face import Failure, Make
from tests.integration.gateways.kafka_contract.kafka_python_face import KafkaPython

__all__ = ["BEHAVIOURS", "CLIENTS", "compared", "observe", "observed"]

CLIENTS: Final[dict[str, Make]] = {
    "confluent-kafka": Confluent,
    "kafka-python": KafkaPython,
    "aiokafka": AioKafka,
}
FILE: Final = Path(__file__).with_name("observed.json")


def observe(behaviour: str, client: str, bootstrap: str) -> Any:
    """What a client sees of a behaviour, as JSON would give it back."""
    with CLIENTS[client](bootstrap) as face:
        return json.loads(json.dumps(BEHAVIOURS[behaviour](face)))


def observed(behaviour: str, client: str) -> Any:
    """What the client saw of real Kafka."""
    found = json.loads(FILE.read_text(encoding="utf-8"))[behaviour]
    return found.get(client, found.get("all"))


def compared(behaviour: str, client: str, bootstrap: str) -> tuple[Any, Any]:
    """What a gateway shows, and what Kafka showed, except for the wanted differences."""
    wanted = expected(behaviour, client, observed(behaviour, client))
    try:
        return observe(behaviour, client, bootstrap), wanted
    except Failure as refused:
        if not isinstance(wanted, Refusal):
            raise
        return Refusal(refused.code), wanted


def _together(seen: dict[str, Any]) -> dict[str, Any]:
    """One entry for all clients if they saw the same."""
    first, *others = seen.values()
    same = len(seen) == len(CLIENTS) and all(one == first for one in others)
    return {"all": first} if same else seen


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _look(bootstrap: str, behaviours: list[str], clients: list[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name in behaviours:
        for client in clients:
            began = time.monotonic()
            try:
                result = observe(name, client, bootstrap)
            except Exception as error:  # all others are still of interest
                result = f"broken: {error!r}"
            seen.setdefault(name, {})[client] = result
            _say(f"{time.monotonic() - began:6.1f} s  {name}  {client}")
    return seen


def main() -> int:
    """Record what Kafka does, or compare a server with the record; 1 if it differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", help="compare this one instead of recording Kafka")
    parser.add_argument("--only", action="append", default=[], help="part of a behaviour's name")
    parser.add_argument("--client", action="append", default=[], choices=list(CLIENTS))
    chosen = parser.parse_args()
    clients = chosen.client or list(CLIENTS)
    names = [n for n in BEHAVIOURS if not chosen.only or any(one in n for one in chosen.only)]
    if chosen.server:
        different = 0
        for name, seen in _look(chosen.server, names, clients).items():
            for client, found in seen.items():
                wanted = observed(name, client)
                if found != wanted:
                    different += 1
                    _say(f"{name}, {client}\n  Kafka   {wanted}\n  server  {found}")
        return 1 if different else 0
    with KafkaServer() as kafka:
        seen = _look(kafka.bootstrap, names, clients)
    old = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name, found in seen.items():
        known = old.get(name, {})
        spread = dict.fromkeys(CLIENTS, known["all"]) if "all" in known else known
        old[name] = _together({**spread, **found})
    kept = {name: old[name] for name in BEHAVIOURS if name in old}
    FILE.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
