"""What messaging needs from a topic's schema; the schemas room provides it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.events.packs.pack import Pack
    from millstream.wire.message import RawMessage

__all__ = ["Copying", "ValueType"]


class Copying(NamedTuple):
    """How to copy values of a type that have nothing in them that can be changed in place.

    `make(*take(value))` is what `decode` makes of `encode(value)`, and `encode(plain(take(value)))`
    is `encode(value)`, which is certain to succeed.
    """

    take: Callable[[Any], tuple[Any, ...] | None]  # what is in a value; None: not known
    make: Callable[..., Any]
    plain: Callable[[tuple[Any, ...]], dict[str, Any]]
    size_max: int  # bytes of a value, at most


class ValueType(Protocol):
    """The type of a topic's values, by which they are checked, encoded and decoded."""

    @property
    def schema_id(self) -> str:
        """The registry's id of the version that is written."""

    @property
    def copies(self) -> Copying | None:
        """How values are copied without their bytes; None: they have to be encoded and decoded."""

    def encode(self, value: object) -> bytes:
        """One value in the topic's wire format; Unfit when it does not fit."""

    def parse(self, text: bytes) -> Any:
        """A value that people wrote as JSON, to be published; Unfit when it does not fit."""

    def decode(self, data: bytes, schema_id: str | None) -> Any:
        """One value as written with the given version, resolved to this one."""

    async def learn(self, messages: Iterable[RawMessage]) -> None:
        """Load every version that these messages were written with, so that `decode` and `values`
        need not wait; a missing one is an error only when its value is asked for."""

    def column(self, values: Sequence[object]) -> pa.StructArray:
        """Many values as a column of a pack; Unfit names row and field."""

    def conform(self, values: pa.StructArray) -> pa.StructArray:
        """A column that came as Arrow data, in the topic's type; Unfit when it does not fit."""

    def read_column(self, payloads: Sequence[tuple[bytes | None, str | None]]) -> pa.StructArray:
        """Single values (payload, schema id) as a column, resolved to this version."""

    def values(self, pack: Pack) -> Sequence[Any]:
        """The values of a pack, resolved to this version; one that cannot be is Unreadable."""

    def resolve(self, values: pa.StructArray, schema_id: str | None) -> pa.StructArray:
        """A column as written with the given version, resolved to this one without copying."""
