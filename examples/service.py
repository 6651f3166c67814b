"""Request and reply: a service with two endpoints, its errors and its statistics.

`python -m examples.service`
"""

from __future__ import annotations

import asyncio
import json

import millstream
from examples.own_broker import broker_url
from millstream.errors import NoResponders, ServiceError

PRICES = {"flour": 12.5, "bran": 4.0}


async def main() -> None:
    with broker_url() as url:
        async with millstream.connect(url) as mill:
            service = mill.service("prices", "1.0.0", description="What a sack costs")

            @service.endpoint("prices.get")
            async def price(request: millstream.Message) -> bytes:
                name = request.data.decode()
                if name not in PRICES:
                    raise ServiceError("prices.get", "404", f"nobody sells {name}")
                return json.dumps(PRICES[name]).encode()

            @service.endpoint("prices.list")
            async def names(request: millstream.Message) -> bytes:
                return json.dumps(sorted(PRICES)).encode()

            async with service:
                answer = await mill.request("prices.get", "flour")
                print(f"a sack of flour costs {json.loads(answer.data)}")
                answer = await mill.request("prices.list")
                print(f"for sale: {', '.join(json.loads(answer.data))}")
                try:
                    await mill.request("prices.get", "gold")
                except ServiceError as error:
                    print(f"refused: {error.description}")
            try:
                await mill.request("prices.get", "flour")
            except NoResponders:
                print("the service is gone, and the request fails immediately")


if __name__ == "__main__":
    asyncio.run(main())
