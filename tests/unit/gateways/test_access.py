"""The rights of one logged-in user, for its connections, and the passwords of a data folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from millstream.broker import User, new_key
from millstream.broker.folder_users import ACCOUNTS_FILE, user_entry
from millstream.gateways.folder_passwords import FolderPasswords
from millstream.gateways.rights import Rights, TopicSubjects
from millstream.gateways.scram import ITERATIONS, SCRAM_HASHES, make_verifier
from millstream.gateways.user_access import DECISIONS_MAX, Access
from millstream.settings import Secret

ORDERS = TopicSubjects(("orders",), ("orders",))
READING = Rights("ann", "main", ("$JS.API.STREAM.INFO.orders", "$JS.API.DIRECT.GET.orders"))


# -- Access -----------------------------------------------------------------------------------


def test_rights_are_those_of_the_last_answer() -> None:
    access = Access("ann", READING)
    assert access.may_read(ORDERS)
    assert not access.may_write(ORDERS)
    access.update(Rights("ann", "main", ("orders.>",)))
    assert not access.may_read(ORDERS)
    assert access.may_write(ORDERS)
    access.update(Rights("ann", "main"))
    assert access.may_manage(ORDERS)
    assert access.may_create("anything")
    assert access.may_join("anything")


def test_each_kind_of_right_is_decided_for_itself() -> None:
    access = Access("orders", READING)
    for _ in range(2):  # also when it is remembered
        assert not access.may_create("orders")
        assert not access.may_manage(ORDERS)
        assert access.may_read(ORDERS)
        assert not access.may_join("orders")


def test_what_is_remembered_is_bounded() -> None:
    access = Access("ann", READING)
    for number in range(3 * DECISIONS_MAX):
        assert not access.may_create(f"topic-{number}")
        assert len(access._known) <= DECISIONS_MAX


def test_a_revoked_login_allows_nothing_and_closes_its_connections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    access = Access("ann", Rights("ann", "main"))
    closed: list[str] = []

    def one(reason: str) -> None:
        closed.append(f"one: {reason}")

    def broken(reason: str) -> None:
        raise RuntimeError(reason)

    def gone(reason: str) -> None:
        closed.append(f"gone: {reason}")

    for close in (one, broken, gone):
        access.join(close)
    access.leave(gone)
    access.leave(gone)
    with caplog.at_level(logging.ERROR):
        access.revoke("removed")
    assert closed == ["one: removed"]
    assert "was not closed" in caplog.text
    assert access.revoked
    assert not access.in_use
    assert not access.may_read(ORDERS)
    assert not access.may_join("ann")


# -- the passwords of a data folder -----------------------------------------------------------


def write_users(data: Path, users: list[User], **facts: Any) -> None:
    file = data / ACCOUNTS_FILE
    draft = data / "draft"
    draft.write_text(json.dumps({"users": [user_entry(user) for user in users], **facts}))
    draft.replace(file)


ANN = User("ann", Secret("s3cret"))


@pytest.mark.parametrize("mechanism", SCRAM_HASHES)
def test_a_verifier_is_made_of_the_password_in_the_folder(tmp_path: Path, mechanism: str) -> None:
    write_users(tmp_path, [ANN])
    folder = FolderPasswords(tmp_path)
    assert folder.usable()
    verifier = folder.verifier("ann", mechanism)
    assert verifier == make_verifier(mechanism, Secret("s3cret"), verifier.salt)
    assert verifier is folder.verifier("ann", mechanism)  # kept
    assert folder.password("ann", verifier) == Secret("s3cret")


def test_an_unknown_user_gets_a_verifier_that_nothing_fits(tmp_path: Path) -> None:
    write_users(tmp_path, [ANN])
    folder = FolderPasswords(tmp_path)
    known, fake = (folder.verifier(name, "SCRAM-SHA-256") for name in ("ann", "bob"))
    assert (known.known, fake.known) == (True, False)
    assert (len(fake.salt), fake.iterations) == (len(known.salt), ITERATIONS)
    assert fake == folder.verifier("bob", "SCRAM-SHA-256")
    assert folder.password("bob", fake) is None
    assert folder.password("bob", known) is None


def test_a_user_with_a_key_or_a_hash_has_no_password_to_prove(tmp_path: Path) -> None:
    hashed = User("sal", Secret("$2a$11$3kIDaCxw.Glsl1.u5nKa6eUnNDLV5HV9tIuUp7EHhMt6Nm9myW1aS"))
    key = User("kim", nkey=new_key("user").public)
    write_users(tmp_path, [hashed, key])
    folder = FolderPasswords(tmp_path)
    assert not folder.usable()
    assert not folder.verifier("sal", "SCRAM-SHA-256").known
    assert not folder.verifier("kim", "SCRAM-SHA-256").known


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    folder = FolderPasswords(tmp_path)
    assert not folder.usable()
    assert not folder.verifier("ann", "SCRAM-SHA-256").known
    write_users(tmp_path, [ANN])
    before = folder.verifier("ann", "SCRAM-SHA-256")
    assert before.known
    write_users(tmp_path, [User("ann", Secret("changed"))])
    assert folder.password("ann", before) is None
    after = folder.verifier("ann", "SCRAM-SHA-256")
    assert folder.password("ann", after) == Secret("changed")
    write_users(tmp_path, [])
    assert folder.password("ann", after) is None
    assert not folder.usable()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"operator": true, "users": []}'])
def test_a_folder_without_users_is_not_usable(tmp_path: Path, text: str) -> None:
    (tmp_path / ACCOUNTS_FILE).write_text(text)
    assert not FolderPasswords(tmp_path).usable()


def test_in_operator_mode_the_folder_has_no_say(tmp_path: Path) -> None:
    write_users(tmp_path, [ANN], operator=True)
    assert not FolderPasswords(tmp_path).usable()


def test_verifiers_are_kept_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.gateways.folder_passwords.VERIFIERS_MAX", 3)
    write_users(tmp_path, [ANN])
    folder = FolderPasswords(tmp_path)
    for number in range(10):
        folder.verifier(f"user-{number}", "SCRAM-SHA-256")
        assert len(folder._verifiers) <= 3


def test_no_password_is_shown(tmp_path: Path) -> None:
    write_users(tmp_path, [ANN])
    folder = FolderPasswords(tmp_path)
    folder.verifier("ann", "SCRAM-SHA-256")
    assert "s3cret" not in repr(vars(folder))
