"""What tests of stores do besides calling them."""

from __future__ import annotations

import msgspec

from millstream import Mill
from millstream.wire.api import PubAck
from tests.integration.messaging.topic_kit import eventually


async def publish_raw(
    mill: Mill, subject: str, payload: bytes, headers: dict[str, str] | None = None
) -> bool:
    """Publish as another program does; whether the broker took it for a duplicate."""
    block = b""
    if headers:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        block = f"NATS/1.0\r\n{lines}\r\n".encode()
    _, answer = await mill.connection.request(subject, payload, block)
    return msgspec.json.decode(answer, type=PubAck).duplicate


async def forget_ids(mill: Mill, store: str) -> None:
    """Return when the broker has forgotten the ids of all that was stored so far."""
    await mill.edit_topic(store, duplicate_window="100ms")

    async def is_remembered() -> bool:
        return await publish_raw(mill, f"{store}.probe", b"", {"Nats-Msg-Id": "probe"})

    await is_remembered()
    await eventually(is_remembered, False)
