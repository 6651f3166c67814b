"""Personal fields: which may be marked, and that nobody reads them without the key."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError, DataLoss, MissingExtra, SchemaError, Unfit
from millstream.event_store.privacy import (
    ERASED,
    Context,
    Personal,
    PersonKey,
    key_ids_in,
    new_key,
    open_blob,
    personal_fields,
    persons_in,
    reveal,
    seal,
    seal_blob,
)
from millstream.schemas.codecs import make_codec
from millstream.schemas.declaration import declare

CONTEXT = Context("accounts", "Registered")


@dataclass
class Registered:
    name: Annotated[str, Personal()]
    customer: str
    note: Annotated[str | None, Personal(of="customer", erased="(erased)")] = None
    city: Annotated[str, Personal()] | None = None
    amount: int = 0


class RegisteredStruct(msgspec.Struct):
    name: Annotated[str, Personal()]
    customer: str
    note: Annotated[str | None, Personal(of="customer", erased="(erased)")] = None
    city: Annotated[str, Personal()] | None = None
    amount: int = 0


class RegisteredModel(pydantic.BaseModel):
    name: Annotated[str, Personal()]
    customer: str
    note: Annotated[str | None, Personal(of="customer", erased="(erased)")] = None
    city: Annotated[str, Personal()] | None = None
    amount: int = 0


class Keys(dict[str, PersonKey]):
    """A key for everybody."""

    def __missing__(self, person: str) -> PersonKey:
        self[person] = new_key()
        return self[person]

    def by_id(self) -> dict[str, bytes]:
        return {key.id: key.key for key in self.values()}


FIELDS = personal_fields(Registered)


def sealed(plain: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    return seal(plain, FIELDS, CONTEXT, "ann", keys.__getitem__)


# -- marks --------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Registered, RegisteredStruct, RegisteredModel])
def test_marks_are_found_and_are_no_part_of_the_schema(cls: type) -> None:
    note = Personal(of="customer", erased="(erased)")
    assert personal_fields(cls) == {"name": Personal(), "note": note, "city": Personal()}

    @dataclass
    class Unmarked:
        name: str
        customer: str
        note: str | None = None
        city: str | None = None
        amount: int = 0

    marked, plain = declare(cls, name="Registered"), declare(Unmarked, name="Registered")
    assert marked.fingerprint == plain.fingerprint
    made = cls(name="Ann", customer="c1", note="n")
    codec = make_codec(marked, "json")
    assert codec.decode(codec.encode(made))["name"] == "Ann"


@dataclass
class Inner:
    secret: Annotated[str, Personal()]


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (Annotated[int, Personal()], "only text"),
        (Annotated[str | int, Personal()], "only text"),
        (Annotated[list[str], Personal()], "only text"),
        (list[Annotated[str, Personal()]], "inside a list"),
        (dict[str, Annotated[str, Personal()]], "inside a list"),
        (Inner, "Marked.field.secret"),
        (list[Inner], "inside a list"),
        (Inner | None, "inside a list"),
        (Annotated[str, Personal(of="nobody")], "needs a text field"),
        (Annotated[str, Personal(of="number")], "needs a text field"),
        (Annotated[str, Personal], "with parentheses"),
        (Annotated[str, Personal(), Personal(erased="x")], "marked twice"),
    ],
    ids=str,
)
def test_a_mark_that_cannot_be_honored_is_refused(hint: Any, text: str) -> None:
    class Marked:
        __annotations__ = {"field": hint, "number": int}

    with pytest.raises(ConfigError, match=text) as caught:
        personal_fields(dataclass(Marked))
    assert "Marked.field" in str(caught.value)


# -- fields -------------------------------------------------------------------------------


@given(st.text(), st.text() | st.none(), st.text() | st.none(), st.text(min_size=1), st.integers())
def test_what_is_sealed_is_revealed_again(
    name: str, note: str | None, city: str | None, customer: str, amount: int
) -> None:
    plain = {"name": name, "customer": customer, "note": note, "city": city, "amount": amount}
    try:
        "".join(text for text in plain.values() if isinstance(text, str)).encode()
    except UnicodeEncodeError:
        return  # not a text that can be stored
    keys = Keys()
    found = sealed(plain, keys)
    assert set(keys) == persons_in(plain, FIELDS, "ann")
    assert (found["customer"], found["amount"]) == (customer, amount)
    for field in FIELDS:
        if plain[field] is None:
            assert found[field] is None
        else:
            assert found[field].startswith("mill:enc:1:")
    assert key_ids_in(msgspec.json.encode(found)) == keys.by_id().keys()
    assert reveal(found, FIELDS, CONTEXT, keys.by_id()) == plain


def test_the_same_text_is_never_sealed_the_same_way() -> None:
    keys = Keys()
    plain = {"name": "Ann Arbor", "customer": "c1"}
    texts = {sealed(plain, keys)["name"] for _ in range(100)}
    assert len(texts) == 100
    for text in texts:
        assert "Ann" not in text
        assert b"Ann" not in base64.b64decode(text.rpartition(":")[2])


def test_an_erased_person_is_read_as_the_mark_says() -> None:
    keys = Keys()
    found = sealed({"name": "Ann", "customer": "c1", "note": "n", "city": "x"}, keys)
    now = {**keys.by_id(), keys["c1"].id: ERASED}
    assert reveal(found, FIELDS, CONTEXT, now) == {
        "name": "Ann",
        "customer": "c1",
        "note": "(erased)",
        "city": "x",
    }
    now[keys["ann"].id] = ERASED
    assert reveal(found, FIELDS, CONTEXT, now)["name"] == ""


def test_a_key_that_is_missing_is_no_erased_person() -> None:
    found = sealed({"name": "Ann", "customer": "c1"}, Keys())
    with pytest.raises(DataLoss, match="was not erased"):
        reveal(found, FIELDS, CONTEXT, {})


def test_a_text_is_bound_to_its_context_and_to_its_key() -> None:
    keys = Keys()
    found = sealed({"name": "Ann", "customer": "c1", "city": "Lyon"}, keys)
    moved = {**found, "name": found["city"]}
    elsewhere = [CONTEXT._replace(store="other"), CONTEXT._replace(event="Renamed")]
    changed = found["name"][:-6] + ("A" if found["name"][-6] != "A" else "B") + found["name"][-5:]
    cases = [
        (moved, CONTEXT, keys.by_id()),
        *((found, context, keys.by_id()) for context in elsewhere),
        ({**found, "name": changed}, CONTEXT, keys.by_id()),
        ({**found, "name": found["name"][:60]}, CONTEXT, keys.by_id()),
        ({**found, "name": "mill:enc:1:garbage"}, CONTEXT, keys.by_id()),
        (found, CONTEXT, dict.fromkeys(keys.by_id(), b"k" * 32)),
    ]
    for plain, context, known in cases:
        with pytest.raises(SchemaError, match="field 'name'"):
            reveal(plain, FIELDS, context, known)


def test_a_field_that_is_no_longer_marked_is_still_revealed() -> None:
    keys = Keys()
    found = sealed({"name": "Ann", "customer": "c1"}, keys)
    assert reveal(found, {}, CONTEXT, keys.by_id())["name"] == "Ann"
    # A text that only looks like a sealed one is what it is.
    for text in ("mill:enc:1:", "mill:enc:1:x:y", found["name"]):
        assert reveal({"other": text}, {}, CONTEXT, keys.by_id()) == {"other": text}


def test_a_text_without_a_person_is_refused() -> None:
    for customer in (None, "", 5):
        with pytest.raises(Unfit, match="person"):
            sealed({"name": "Ann", "customer": customer, "note": "n"}, Keys())
    with pytest.raises(Unfit, match="expected text"):
        sealed({"name": 5, "customer": "c1"}, Keys())


# -- blobs --------------------------------------------------------------------------------


@given(st.binary(), st.integers(0, 4))
def test_a_blob_needs_the_keys_of_all_persons(data: bytes, persons: int) -> None:
    if data.startswith(b"mill:blob:1:"):
        return
    keys = [new_key() for _ in range(persons)]
    blob = seal_blob(data, [*keys, *keys], CONTEXT)
    known = {key.id: key.key for key in keys}
    assert key_ids_in(blob) == known.keys()
    assert open_blob(blob, known, CONTEXT) == data
    for key in keys:
        assert open_blob(blob, {**known, key.id: ERASED}, CONTEXT) is None
        rest = {id_: value for id_, value in known.items() if id_ != key.id}
        assert open_blob(blob, rest, CONTEXT) is None


def test_a_blob_that_was_changed_is_refused() -> None:
    keys = [new_key(), new_key()]
    known = {key.id: key.key for key in keys}
    blob = seal_blob(b"state", keys, CONTEXT)
    for changed in (blob[:-1] + bytes([blob[-1] ^ 1]), blob[:-20], b"mill:blob:1:x"):
        with pytest.raises(SchemaError):
            open_blob(changed, known, CONTEXT)
    with pytest.raises(SchemaError, match="moved"):
        open_blob(blob, known, Context("other", "Registered"))


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtra, match=r"millstream\[privacy\]"):
        sealed({"name": "Ann", "customer": "c1"}, Keys())


def test_a_key_is_not_shown() -> None:
    key = new_key()
    assert key.id in repr(key)
    assert repr(key.key)[2:-1] not in repr(key)
