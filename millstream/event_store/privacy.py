"""Personal fields of events: marked, sealed with the key of a person, and revealed with it. Pure.

    @dataclass
    class Registered:
        name: Annotated[str, Personal()]                # of the person that the aggregate is
        customer: str
        note: Annotated[str | None, Personal(of="customer")]

In the log, in copies of it and in files made from it, a marked field is the text `mill:enc:1:`, the
id of the person's key, a colon, and in base64 a random nonce and the ciphertext (AES-256-GCM). It
is bound to its store, event and field. Whoever erases the key makes the text unreadable
everywhere. Ids of keys are random, so they say nothing about persons.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from millstream.errors import ConfigError, DataLoss, SchemaError, Unfit
from millstream.schemas.extras import needed
from millstream.schemas.values.fit import field_names

__all__ = [
    "ERASED",
    "KEY_BYTES",
    "SEALED_MARK",
    "Context",
    "PersonKey",
    "Personal",
    "key_ids_in",
    "new_key",
    "open_blob",
    "personal_fields",
    "persons_in",
    "reveal",
    "seal",
    "seal_blob",
]

KEY_BYTES: Final = 32  # AES-256
# Instead of a key: it was erased.
ERASED: Final = b""
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_ID_BYTES: Final = 16
_TEXT: Final = "mill:enc:1:"
SEALED_MARK: Final = _TEXT.encode()  # in every payload that has a sealed text
_BLOB: Final = b"mill:blob:1:"
_ID: Final = r"[A-Za-z0-9_-]{22}"
_SEALED: Final = re.compile(rf"mill:enc:1:({_ID}):([A-Za-z0-9+/]+={{0,2}})")
_IDS: Final = re.compile(rb"mill:enc:1:([A-Za-z0-9_-]{22}):")
_BLOB_HEAD: Final = re.compile(rb"mill:blob:1:((?:[A-Za-z0-9_-]{22},?)+):")


@dataclass(frozen=True, slots=True)
class Personal:
    """Marks a text field of an event as personal: `Annotated[str, Personal()]`.

    `of` names the field of the same event that has the person's id; None: the aggregate's id is the
    person. `erased` is what is read after the person's key was erased.
    """

    of: str | None = None
    erased: str = ""


class PersonKey(NamedTuple):
    """The key of a person, with its own random id."""

    id: str
    key: bytes

    def __repr__(self) -> str:
        return f"PersonKey(id={self.id!r})"  # the key must not get into logs


class Context(NamedTuple):
    """The store and event that a text belongs to; elsewhere it cannot be read."""

    store: str
    event: str

    def of(self, field: str) -> bytes:
        """What a text of a field is bound to."""
        return "\0".join((self.store, self.event, field)).encode()


def new_key() -> PersonKey:
    """A random key under a random id."""
    name = base64.urlsafe_b64encode(os.urandom(_ID_BYTES)).rstrip(b"=").decode()
    return PersonKey(name, os.urandom(KEY_BYTES))


# -- marks --------------------------------------------------------------------------------


def personal_fields(cls: type) -> dict[str, Personal]:
    """The marked fields of a class of events: dataclass, msgspec Struct or Pydantic model.

    ConfigError for a mark that could not be honored: on another type than text, inside a list or
    another class, or with a person that no field has.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    names = field_names(cls) or ()
    found: dict[str, Personal] = {}
    for name in names:
        where = f"{cls.__name__}.{name}"
        mark = _mark_of(hints[name], where)
        if mark is None:
            _check_unmarked(hints[name], where, (cls,))
            continue
        if not _is_text(hints[name]):
            raise ConfigError(
                f"{where}: only text can be personal (str or str | None). Store other values as "
                f"text, or leave the mark out"
            )
        if mark.of is not None and (mark.of not in names or not _is_text(hints[mark.of])):
            raise ConfigError(
                f"{where}: Personal(of={mark.of!r}) needs a text field of that name in "
                f"{cls.__name__}: it has the id of the person"
            )
        found[name] = mark
    return found


def _mark_of(hint: Any, where: str) -> Personal | None:
    """The mark of a field: on its type, or on its type without None."""
    facts = [fact for part in _without_none(hint) for fact in _facts(part)]
    marks = [fact for fact in (*_facts(hint), *facts) if isinstance(fact, Personal)]
    if any(fact is Personal for fact in (*_facts(hint), *facts)):
        raise ConfigError(f"{where}: write Personal() with parentheses")
    if len(set(marks)) > 1:
        raise ConfigError(f"{where}: it is marked twice")
    return marks[0] if marks else None


def _facts(hint: Any) -> tuple[Any, ...]:
    return hint.__metadata__ if typing.get_origin(hint) is typing.Annotated else ()


def _bare(hint: Any) -> Any:
    return hint.__origin__ if typing.get_origin(hint) is typing.Annotated else hint


def _without_none(hint: Any) -> list[Any]:
    """The types that a field may have, apart from None."""
    bare = _bare(hint)
    if typing.get_origin(bare) in (typing.Union, types.UnionType):
        return [part for part in typing.get_args(bare) if part is not type(None)]
    return [bare]


def _is_text(hint: Any) -> bool:
    parts = _without_none(hint)
    return len(parts) == 1 and _bare(parts[0]) is str


def _check_unmarked(hint: Any, where: str, inside: tuple[Any, ...]) -> None:
    """Refuse a mark somewhere inside a type: it would not be honored."""
    if any(isinstance(fact, Personal) for fact in _facts(hint)):
        raise ConfigError(
            f"{where}: a mark Personal is inside a list, map, union or another class. Only text "
            f"fields of the event itself can be personal"
        )
    bare = _bare(hint)
    for part in typing.get_args(bare):
        _check_unmarked(part, where, inside)
    if isinstance(bare, type) and bare not in inside and field_names(bare) is not None:
        below = typing.get_type_hints(bare, include_extras=True)
        for name in field_names(bare) or ():
            _check_unmarked(below[name], f"{where}.{name}", (*inside, bare))


# -- fields -------------------------------------------------------------------------------


def _persons(
    plain: Mapping[str, Any], fields: Mapping[str, Personal], aggregate: str
) -> Iterator[tuple[str, str]]:
    """The marked fields that have a text, each with its person."""
    for name, mark in fields.items():
        if plain.get(name) is None:
            continue
        person = aggregate if mark.of is None else plain.get(mark.of)
        if not isinstance(person, str) or not person:
            raise Unfit(mark.of or name, f"the id of the person that '{name}' is of", repr(person))
        yield name, person


def persons_in(
    plain: Mapping[str, Any], fields: Mapping[str, Personal], aggregate: str
) -> set[str]:
    """The persons whose keys are needed to seal an event."""
    return {person for _, person in _persons(plain, fields, aggregate)}


def seal(
    plain: Mapping[str, Any],
    fields: Mapping[str, Personal],
    context: Context,
    aggregate: str,
    key_of: Callable[[str], PersonKey],
) -> dict[str, Any]:
    """An event with its marked texts sealed; `key_of` gives the keys of `persons_in`."""
    sealed = dict(plain)
    for name, person in _persons(plain, fields, aggregate):
        text = plain[name]
        if not isinstance(text, str):
            raise Unfit(name, "text", type(text).__name__)
        key = key_of(person)
        body = base64.b64encode(_encrypted(key.key, text.encode(), context.of(name)))
        sealed[name] = f"{_TEXT}{key.id}:{body.decode()}"
    return sealed


def reveal(
    plain: Mapping[str, Any],
    fields: Mapping[str, Personal],
    context: Context,
    keys: Mapping[str, bytes],
) -> dict[str, Any]:
    """An event as it was written, with its field names of then: sealed texts are readable again.

    Where the key is ERASED, a text is what its mark says. A field that is not marked now may have
    been when it was written; if its text is a sealed one, it is revealed too. DataLoss when the key
    of a marked field is missing and was not erased; SchemaError when a text was changed or moved.
    """
    revealed = dict(plain)
    for name, text in plain.items():
        if not isinstance(text, str) or not text.startswith(_TEXT):
            continue
        mark, parts = fields.get(name), _SEALED.fullmatch(text)
        if parts is None:
            if mark is not None:
                raise SchemaError(f"field '{name}' of {context.event}: its sealed text is damaged")
            continue
        key = keys.get(parts[1])
        if key == ERASED:
            revealed[name] = Personal().erased if mark is None else mark.erased
        elif key is not None:
            opened = _opened_text(name, parts[2], context, key, is_marked=mark is not None)
            revealed[name] = text if opened is None else opened
        elif mark is not None:
            raise DataLoss(
                f"field '{name}' of {context.event}: its key '{parts[1]}' is not in the key table "
                f"of store '{context.store}', and was not erased. Restore the table, or read with "
                f"the one that belongs to the events"
            )
    return revealed


def _opened_text(
    name: str, body: str, context: Context, key: bytes, *, is_marked: bool
) -> str | None:
    """The text; None when it cannot be opened and its field is not marked."""
    try:
        return _decrypted(key, base64.b64decode(body, validate=True), context.of(name)).decode()
    except (ValueError, binascii.Error) as error:
        if not is_marked:
            return None
        raise SchemaError(
            f"field '{name}' of {context.event}: its sealed text cannot be opened: it was changed, "
            f"or it comes from another store, event or field"
        ) from error


def key_ids_in(payload: bytes) -> set[str]:
    """The ids of the keys that the sealed texts of a payload, or a sealed blob, need."""
    if payload.startswith(_BLOB):
        head = _BLOB_HEAD.match(payload)
        return set() if head is None else set(head[1].decode().split(","))
    if payload.find(SEALED_MARK) < 0:
        return set()
    return {found.decode() for found in _IDS.findall(payload)}


# -- blobs --------------------------------------------------------------------------------


def seal_blob(data: bytes, keys: Sequence[PersonKey], context: Context) -> bytes:
    """Bytes that several persons have a part in, sealed with all their keys.

    They cannot be read when one of the keys is erased. Without keys they stay as they are.
    """
    if not keys:
        return data
    ordered = sorted(set(keys))
    head = _BLOB + ",".join(key.id for key in ordered).encode() + b":"
    for key in ordered:
        data = _encrypted(key.key, data, head + context.of(""))
    return head + data


def open_blob(blob: bytes, keys: Mapping[str, bytes], context: Context) -> bytes | None:
    """The bytes of `seal_blob`; None when one of their keys is erased or not known.

    SchemaError when they were changed, or belong to another store or event.
    """
    if not blob.startswith(_BLOB):
        return blob
    head = _BLOB_HEAD.match(blob)
    if head is None:
        raise SchemaError(f"a sealed blob of {context.store} is damaged: it names no keys")
    needs = [keys.get(name) for name in head[1].decode().split(",")]
    data = blob[head.end() :]
    for key in reversed(needs):
        if not key:
            return None
        try:
            data = _decrypted(key, data, head[0] + context.of(""))
        except ValueError as error:
            raise SchemaError(
                f"a sealed blob of {context.store} cannot be opened: it was changed or moved"
            ) from error
    return data


# -- the cipher ---------------------------------------------------------------------------


def _cipher(key: bytes) -> Any:
    aead = needed("cryptography.hazmat.primitives.ciphers.aead", "privacy")
    return aead.AESGCM(key)


def _encrypted(key: bytes, data: bytes, bound_to: bytes) -> bytes:
    """A new nonce and the ciphertext.

    Nonces are random, and a key belongs to one person: it seals far fewer texts than the 2**32
    after which two nonces might be the same.
    """
    nonce = os.urandom(_NONCE_BYTES)
    sealed: bytes = _cipher(key).encrypt(nonce, data, bound_to)
    return nonce + sealed


def _decrypted(key: bytes, sealed: bytes, bound_to: bytes) -> bytes:
    """The data; a ValueError when the key or the context is wrong, or a bit was changed."""
    invalid = needed("cryptography.exceptions", "privacy").InvalidTag
    if len(sealed) < _NONCE_BYTES + _TAG_BYTES:
        raise ValueError("too short")
    try:
        data: bytes = _cipher(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], bound_to)
    except invalid as error:
        raise ValueError("not authentic") from error
    return data
