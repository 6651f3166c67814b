"""A copy of an object is what a reader of its bytes gets, or there is none."""

from __future__ import annotations

import datetime as dt
import enum
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic
import pytest

from millstream.schemas import Schema
from millstream.schemas.declaration import declare
from millstream.schemas.registry.binding import RawValues, TypedValues
from millstream.schemas.registry.records import new_record


@dataclass
class Plain:
    number: int
    text: str
    rate: float
    sure: bool
    day: dt.date
    at: dt.datetime | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        self.text = self.text.strip()


class Frozen(msgspec.Struct, frozen=True):
    number: int = 3


class Part(Frozen, frozen=True):
    pass


class Kind(enum.Enum):
    NEW = "new"


@dataclass
class WithList:
    items: list[int]


@dataclass
class WithKind:
    kind: Kind


@dataclass(kw_only=True)
class ByName:
    number: int


class Model(pydantic.BaseModel):
    number: int


class Text(str):
    pass


async def _nothing(_: int) -> Schema:
    raise AssertionError("no other version is needed")


def values_of(cls: type, format_: Any = "json", written: type | None = None) -> TypedValues:
    schema = declare(written or cls, name=cls.__name__)
    record = new_record("t", format_, None).followed_by(10, schema.fingerprint)
    return TypedValues(record, [schema], _nothing, cls)


DAY = dt.date(2026, 11, 17)
AT = dt.datetime(2026, 11, 17, 1, 30, 0, 123456, dt.UTC)
EAST = dt.timezone(dt.timedelta(hours=2))


@pytest.mark.parametrize("format_", ["json", "avro", "protobuf"])
@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({}, True),
        ({"at": AT, "note": "x"}, True),
        ({"number": -(2**63), "rate": -0.0, "text": ' "\\~ '}, True),
        ({"number": 2**63 - 1, "text": '"' * 200, "note": "\\" * 200, "at": AT}, True),
        ({"rate": -2.2250738585072014e-308}, True),
        ({"text": "ä\U0001f600"}, False),
        ({"text": "\0"}, False),
        ({"text": "x" * 201}, False),
        ({"rate": 1e300, "sure": True}, True),
        ({"rate": 5e-324}, True),
        ({"rate": 2}, False),
        ({"text": Text("x")}, False),
        ({"at": AT.astimezone(EAST)}, False),
        ({"at": AT.replace(fold=1)}, False),
    ],
)
def test_a_copy_is_what_a_reader_gets(format_: str, changes: dict[str, Any], known: bool) -> None:
    values = values_of(Plain, format_)
    value = Plain(5, "x", 0.5, False, DAY)
    for name, changed in changes.items():
        setattr(value, name, changed)
    assert values.copies is not None
    fields = values.copies.take(value)
    assert (fields is not None) == known
    data = values.encode(value)
    read = values.decode(data, values.schema_id)
    if fields is not None:
        assert values.encode(values.copies.plain(fields)) == data
        assert len(data) <= values.copies.size_max
        copy = values.copies.make(*fields)
        assert repr(copy) == repr(read)
        assert copy is not value


@pytest.mark.parametrize("format_", ["json", "avro", "protobuf"])
@pytest.mark.parametrize(
    "changes",
    [
        *({"number": number} for number in (2**63, -(2**63) - 1, True, None, "1")),
        *({"rate": rate} for rate in (float("nan"), float("inf"), None, "1")),
        *({"text": text} for text in ("\ud800", None, 1)),
        *({"day": day} for day in (AT, None, "2026-11-17")),
        *({"at": at} for at in (AT.replace(tzinfo=None), "x", DAY)),
        *({"sure": sure} for sure in (0, None)),
    ],
)
def test_a_value_that_might_not_fit_is_not_copied(format_: str, changes: dict[str, Any]) -> None:
    values = values_of(Plain, format_)
    value = Plain(5, "x", 0.5, False, DAY)
    for name, changed in changes.items():
        setattr(value, name, changed)
    assert values.copies is not None
    assert values.copies.take(value) is None


def test_only_objects_of_the_class_itself_are_copied() -> None:
    values = values_of(Frozen)
    assert values.copies is not None
    assert values.copies.take(Frozen(4)) == (4,)
    assert values.copies.take(Part(4)) is None
    assert values.copies.take({"number": 4}) is None


@pytest.mark.parametrize("cls", [WithList, WithKind, ByName, Model])
def test_classes_whose_fields_are_not_all_there_is_are_not_copied(cls: type) -> None:
    assert values_of(cls).copies is None


@dataclass
class Newer:
    number: int
    more: int | None = None


def test_what_is_written_in_another_version_is_not_copied() -> None:
    assert values_of(Newer, written=Frozen).copies is None
    assert RawValues("t").copies is None
    schema = declare(Frozen)
    record = new_record("t", "json", None).followed_by(10, schema.fingerprint)
    assert TypedValues(record, [schema], _nothing).copies is None
