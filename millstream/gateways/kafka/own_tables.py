"""The tables that the gateway keeps its own records in."""

from __future__ import annotations

from typing import Final

from millstream.errors import ApiError, TopicNotFound
from millstream.mill import Mill
from millstream.tables import Table
from millstream.wire.api import ErrorCode

__all__ = ["own_table"]

_REPLICAS: Final = 3
_TOO_FEW_NODES: Final = (ErrorCode.NO_SUITABLE_PEERS, ErrorCode.REPLICAS_NOT_CLUSTERED)


async def own_table(mill: Mill, name: str) -> Table:
    """A table as it is, with settings that an operator may have changed.

    It is created if there is none: on three nodes if there are three, because with these records
    all offsets would be lost.
    """
    try:
        return await mill.table(name)
    except TopicNotFound:
        pass
    if mill.connection.info.cluster:
        try:
            return await mill.create_table(name, replicas=_REPLICAS)
        except ApiError as error:
            if error.err_code not in _TOO_FEW_NODES:
                raise
    return await mill.create_table(name)
