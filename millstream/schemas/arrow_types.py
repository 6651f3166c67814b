"""The Arrow type of every type of the model.

Enums and UUIDs, for which Arrow has no type of its own, are text. A union is a struct with one
nullable column per option (`member0`, `member1`, ...), as Spark reads Avro's unions. So every Arrow
reader can read every pack.
"""

from __future__ import annotations

import pyarrow as pa

from millstream.schemas import types as t

__all__ = ["arrow_field", "arrow_type", "member_name"]


def member_name(index: int) -> str:
    """The column of the union option at `index`."""
    return f"member{index}"


def arrow_type(type_: t.Type) -> pa.DataType:
    """The Arrow type of a type; nullability is the holding field's."""
    match type_:
        case t.Bool():
            return pa.bool_()
        case t.Int(bits, signed):
            return getattr(pa, f"{'int' if signed else 'uint'}{bits}")()
        case t.Float(bits):
            return pa.float32() if bits == 32 else pa.float64()
        case t.String() | t.Uuid() | t.Enum():
            return pa.string()
        case t.Binary(size):
            return pa.binary() if size is None else pa.binary(size)
        case t.Decimal(precision, scale):
            return pa.decimal128(precision, scale)
        case t.Date():
            return pa.date32()
        case t.Time():
            return pa.time64("us")
        case t.Timestamp(utc):
            return pa.timestamp("us", "UTC" if utc else None)
        case t.Duration():
            return pa.duration("us")
        case t.Nullable():
            return arrow_type(type_.of)
        case t.List():
            return pa.list_(arrow_field("item", type_.item))
        case t.Map():
            return pa.map_(arrow_type(type_.key), arrow_field("value", type_.value))
        case t.Union():
            options = enumerate(type_.options)
            return pa.struct([pa.field(member_name(i), arrow_type(o)) for i, o in options])
        case t.Record():
            return pa.struct([arrow_field(field.name, field.type) for field in type_.fields])


def arrow_field(name: str, type_: t.Type) -> pa.Field:
    """The Arrow field of a type, nullable only if the type is."""
    return pa.field(name, arrow_type(type_), nullable=isinstance(type_, t.Nullable))
