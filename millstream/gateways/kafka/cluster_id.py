"""The id of the "cluster" that clients of Kafka see: random, stored once for a broker."""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64encode
from typing import Final

from millstream.errors import WrongSequence
from millstream.gateways.kafka.own_tables import own_table
from millstream.gateways.kafka.producer_ids import STATE_TABLE
from millstream.mill import Mill

__all__ = ["cluster_id"]

_KEY: Final = "cluster-id"


async def cluster_id(mill: Mill) -> str:
    """The same for all gateways of a broker, and after restarts."""
    table = await own_table(mill, STATE_TABLE)
    entry = await table.get(_KEY)
    if entry is None:
        made = urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")
        try:
            await table.put(_KEY, {"id": made}, revision=0)
            return made
        except WrongSequence:
            entry = await table.get(_KEY)  # another gateway was faster
    return "" if entry is None else str(entry.json()["id"])
