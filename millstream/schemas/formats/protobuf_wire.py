"""Single events as Protobuf messages, built at run time from a descriptor."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import decimal
import uuid
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.formats.proto_pool import make_pool, need
from millstream.schemas.formats.proto_reading import load_set, load_text
from millstream.schemas.formats.protobuf import to_descriptor
from millstream.schemas.schema import Schema
from millstream.schemas.values.fit import compile_fit, fresh, unfit_below

__all__ = ["ProtobufWire"]

_Convert: TypeAlias = Callable[[Any], Any]
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_LOCAL_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 (a wall clock has no zone)
_MICROSECOND: Final = dt.timedelta(microseconds=1)
# What google.protobuf.Duration may hold: 10,000 years.
_MAX_SECONDS: Final = 315_576_000_000


class ProtobufWire:
    """Writes a schema declared in Protobuf as declared, any other as `to_descriptor` maps it."""

    def __init__(self, schema: Schema) -> None:
        need()
        from google.protobuf.message import DecodeError

        record, origin = schema.record, schema.origin
        if origin is not None and origin.format in ("protobuf", "descriptor"):
            files = list(_declared(origin.format, origin.text).file)
            name = origin.message
        else:
            file = to_descriptor(record)
            files = [file]
            name = f"{file.package}.{file.message_type[0].name}".lstrip(".")
        message = make_pool(files).FindMessageTypeByName(name)
        self.path = _path_of(message)
        self._kind = t.kind(record)
        self._decode_error = DecodeError
        self._class = _class_of(message)
        self._encode = _record_encoder(record, message)
        self._decode = _record_decoder(record, message)
        self._fit = compile_fit(record)

    def dump(self, value: object) -> bytes:
        """The bytes of a value that fits the schema."""
        return self.dump_plain(self._fit(value))

    def dump_plain(self, plain: dict[str, Any]) -> bytes:
        """The bytes of a plain value, which is known to fit the schema."""
        data: bytes = self._encode(plain).SerializeToString(deterministic=True)
        return data

    def load(self, data: bytes) -> dict[str, Any]:
        """The plain value of the bytes, checked; fields the schema does not know are refused."""
        plain: dict[str, Any] = self._fit(self.load_unchecked(data))
        return plain

    def load_unchecked(self, data: bytes) -> dict[str, Any]:
        """What is in the bytes, for a caller that checks whether the values fit."""
        try:
            message = self._class.FromString(data)
        except self._decode_error as error:
            reason = f"other bytes: {error}"
            raise errors.Unfit("", f"{self._kind} in Protobuf", reason) from None
        found: dict[str, Any] = self._decode(message)
        return found


def _declared(format_: str, text: str) -> Any:
    if format_ == "protobuf":
        return load_text(text)
    try:
        return load_set(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise errors.SchemaError(f"the stored descriptor is not base64: {error}") from None


def _path_of(message: Any) -> tuple[int, ...]:
    """Where a message is declared: its number in its file, or in the messages around it."""
    path: list[int] = []
    while message is not None:
        outer = message.containing_type
        beside = (
            message.file.message_types_by_name.values() if outer is None else outer.nested_types
        )
        path.insert(0, [other.full_name for other in beside].index(message.full_name))
        message = outer
    return tuple(path)


def _class_of(message: Any) -> Any:
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(message)


# -- to messages --------------------------------------------------------------------------


def _record_encoder(record: t.Record, message: Any) -> _Convert:
    cls = _class_of(message)
    plan = [
        (field.name, _field_encoder(field, message), field.name in message.oneofs_by_name)
        for field in record.fields
    ]

    def encode(value: dict[str, Any]) -> Any:
        given: dict[str, Any] = {}
        for name, convert, is_oneof in plan:
            element = value[name]
            if element is None:
                continue
            try:
                if is_oneof:
                    member, element = convert(element)
                    given[member] = element
                else:
                    given[name] = convert(element)
            except errors.Unfit as error:
                raise unfit_below(name, error) from None
        return cls(**given)

    return encode


def _field_encoder(field: t.Field, message: Any) -> _Convert:
    inner, _ = t.strip(field.type)
    oneof = message.oneofs_by_name.get(field.name)
    if oneof is not None:
        return _oneof_encoder(inner, oneof)
    proto = message.fields_by_name[field.name]
    match inner:
        case t.List():
            item = _encoder(inner.item, proto)
            return lambda value: [item(e) for e in value]
        case t.Map():
            entry = _encoder(inner.value, proto.message_type.fields_by_name["value"])
            return lambda value: {key: entry(e) for key, e in value.items()}
        case _:
            return _encoder(inner, proto)


def _oneof_encoder(type_: t.Type, oneof: Any) -> _Convert:
    options = type_.options if isinstance(type_, t.Union) else (type_,)
    plan = [
        (proto.name, compile_fit(option), _encoder(option, proto))
        for option, proto in zip(options, oneof.fields, strict=True)
    ]

    def encode(value: Any) -> tuple[str, Any]:
        for name, fit, convert in plan:
            try:
                fit(value)
            except errors.Unfit:
                continue
            return name, convert(value)
        raise errors.Unfit("", t.kind(type_), repr(value))

    return encode


def _encoder(type_: t.Type, proto: Any) -> _Convert:
    match type_:
        case t.Record():
            return _record_encoder(type_, proto.message_type)
        case t.Enum():
            numbers = {name: v.number for name, v in proto.enum_type.values_by_name.items()}
            return numbers.__getitem__
        case t.Decimal():
            return lambda value: format(value, "f")
        case t.Uuid():
            return str
        case t.Date():
            return lambda value: (value - _EPOCH.date()).days
        case t.Time():
            day = dt.datetime.combine
            return lambda value: (day(_LOCAL_EPOCH, value) - _LOCAL_EPOCH) // _MICROSECOND
        case t.Timestamp(False):
            return lambda value: (value - _LOCAL_EPOCH) // _MICROSECOND
        case t.Timestamp(True):
            cls = _class_of(proto.message_type)
            return lambda value: _seconds(cls, (value - _EPOCH) // _MICROSECOND)
        case t.Duration():
            return _duration_encoder(_class_of(proto.message_type))
        case _:
            return _same


def _same(value: Any) -> Any:
    return value


def _seconds(cls: Any, micros: int) -> Any:
    seconds, rest = divmod(micros, 1_000_000)
    return cls(seconds=seconds, nanos=rest * 1000)


def _duration_encoder(cls: Any) -> _Convert:
    def encode(value: dt.timedelta) -> Any:
        micros = value // _MICROSECOND
        if abs(micros) > _MAX_SECONDS * 1_000_000:
            raise errors.Unfit("", "duration of at most 10,000 years (Protobuf)", repr(value))
        # Both parts of a Duration have the same sign, unlike those of a Timestamp.
        sign = -1 if micros < 0 else 1
        seconds, rest = divmod(abs(micros), 1_000_000)
        return cls(seconds=sign * seconds, nanos=sign * rest * 1000)

    return encode


# -- from messages ------------------------------------------------------------------------


def _record_decoder(record: t.Record, message: Any) -> _Convert:
    from google.protobuf.unknown_fields import UnknownFieldSet

    plan = [(field.name, _field_decoder(field, message)) for field in record.fields]
    kind = t.kind(record)

    def decode(value: Any) -> dict[str, Any]:
        unknown = UnknownFieldSet(value)
        if len(unknown):
            number = unknown[0].field_number
            raise errors.Unfit(f"#{number}", f"no field with that number in {kind}", "a value")
        out = {}
        for name, convert in plan:
            try:
                out[name] = convert(value)
            except errors.Unfit as error:
                raise unfit_below(name, error) from None
        return out

    return decode


def _field_decoder(field: t.Field, message: Any) -> _Convert:
    """A function from the message that holds the field to the field's plain value."""
    inner, nullable = t.strip(field.type)
    name = field.name
    if name in message.oneofs_by_name:
        return _oneof_decoder(field, message.oneofs_by_name[name])
    proto = message.fields_by_name[name]
    match inner:
        case t.List():
            item = _decoder(inner.item, proto)
            return lambda m: [item(e) for e in getattr(m, name)]
        case t.Map():
            entry = _decoder(inner.value, proto.message_type.fields_by_name["value"])
            return lambda m: {key: entry(e) for key, e in getattr(m, name).items()}
    convert = _decoder(inner, proto)
    if not proto.has_presence:
        return lambda m: convert(getattr(m, name))
    absent = None if nullable else field.default

    def decode(m: Any) -> Any:
        if m.HasField(name):
            return convert(getattr(m, name))
        if absent is t.MISSING:
            raise errors.Unfit("", t.kind(inner), "nothing: the field is missing")
        return fresh(absent)

    return decode


def _oneof_decoder(field: t.Field, oneof: Any) -> _Convert:
    inner, nullable = t.strip(field.type)
    options = inner.options if isinstance(inner, t.Union) else (inner,)
    converters = {
        proto.name: _decoder(option, proto)
        for option, proto in zip(options, oneof.fields, strict=True)
    }
    name = oneof.name

    def decode(m: Any) -> Any:
        member = m.WhichOneof(name)
        if member is not None:
            return converters[member](getattr(m, member))
        if not nullable:
            raise errors.Unfit("", t.kind(inner), "nothing: no option is set")
        return None

    return decode


def _decoder(type_: t.Type, proto: Any) -> _Convert:
    match type_:
        case t.Record():
            return _record_decoder(type_, proto.message_type)
        case t.Enum():
            return _enum_decoder(type_, proto.enum_type)
        case t.Decimal():
            return _text_decoder(type_, decimal.Decimal)
        case t.Uuid():
            return _text_decoder(type_, uuid.UUID)
        case t.Date():
            return _number_decoder(type_, lambda n: _EPOCH.date() + dt.timedelta(days=n))
        case t.Time():
            return _number_decoder(type_, _time_of)
        case t.Timestamp(False):
            return _number_decoder(type_, lambda n: _LOCAL_EPOCH + n * _MICROSECOND)
        case t.Timestamp(True):
            return _number_decoder(type_, lambda m: _EPOCH + _micros(m) * _MICROSECOND)
        case t.Duration():
            return _number_decoder(type_, lambda m: _micros(m) * _MICROSECOND)
        case _:
            return _same


def _time_of(micros: int) -> dt.time:
    if not 0 <= micros < 86_400_000_000:
        raise ValueError("not within a day")
    return (_LOCAL_EPOCH + micros * _MICROSECOND).time()


def _micros(message: Any) -> int:
    if message.nanos % 1000:
        raise ValueError(f"{message.nanos} nanoseconds are not whole microseconds")
    return int(message.seconds) * 1_000_000 + int(message.nanos) // 1000


def _number_decoder(type_: t.Type, convert: _Convert) -> _Convert:
    def decode(value: Any) -> Any:
        try:
            return convert(value)
        except (ValueError, OverflowError) as error:
            raise errors.Unfit("", t.kind(type_), f"{value!r:.60} ({error})") from None

    return decode


def _text_decoder(type_: t.Type, convert: _Convert) -> _Convert:
    def decode(value: Any) -> Any:
        try:
            return convert(value)
        except (ValueError, decimal.InvalidOperation):
            raise errors.Unfit("", f"{t.kind(type_)} as text", f"{value!r:.60}") from None

    return decode


def _enum_decoder(type_: t.Enum, enum: Any) -> _Convert:
    symbols: dict[int, str] = {value.number: value.name for value in enum.values}

    def decode(number: int) -> str:
        symbol = symbols.get(number)
        if symbol is None:
            raise errors.Unfit("", t.kind(type_), f"the number {number}, which it does not have")
        return symbol

    return decode
