"""env and context: other clients get in with what they print, and secrets go nowhere else."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import nats
import nats.errors
import pytest

from tests.integration.cli.conftest import Cli


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    cli = Cli(tmp_path_factory.mktemp("secured"))
    cli("up", "--port", "0", "--auth", "--account", "tenant")
    yield cli
    cli.clean_up()


async def can_publish(variables: dict[str, str], subject: str) -> bool:
    errors = []

    async def note(error: Exception) -> None:
        errors.append(error)

    client = await nats.connect(
        variables["NATS_URL"],
        user=variables["NATS_USER"],
        password=variables["NATS_PASSWORD"],
        error_cb=note,
        connect_timeout=30,
    )
    await client.publish(subject, b"x")
    await client.flush()  # this client's PING may overtake what it published
    await client.flush()
    await client.close()
    return not errors


async def test_a_client_connects_with_the_exports_and_has_its_role(cli: Cli) -> None:
    app = cli.json("env")
    assert list(app) == ["NATS_URL", "NATS_USER", "NATS_PASSWORD"]
    assert await can_publish(app, "orders.1")
    assert not await can_publish(cli.json("env", "--role", "reader"), "orders.1")
    tenant = cli.json("env", "--account", "tenant")
    assert tenant["NATS_USER"] == "tenant-app"
    assert await can_publish(tenant, "orders.1")


def test_the_exports_work_in_a_shell(cli: Cli) -> None:
    script = cli("env").stdout + 'printf "%s %s" "$NATS_URL" "$NATS_USER"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{cli.json('status')['url']} app"


def test_unknown_roles_and_accounts_are_refused(cli: Cli) -> None:
    assert "admin, app, reader" in cli.error("env", "--role", "king")
    assert "nobody-app" in cli.error("env", "--account", "nobody")


def test_a_context_is_private_selected_and_complete(cli: Cli) -> None:
    printed = cli.json("context", "mine")
    folder = cli.folder / "config" / "nats"
    file = folder / "context" / "mine.json"
    assert printed == {"name": "mine", "file": str(file), "selected": True}
    assert file.stat().st_mode & 0o777 == 0o600
    content = json.loads(file.read_text())
    admin = cli.json("env", "--role", "admin")
    assert content["url"] == admin["NATS_URL"]
    assert (content["user"], content["password"]) == ("admin", admin["NATS_PASSWORD"])
    assert (folder / "context.txt").read_text() == "mine"
    cli("context", "second", "--no-select")
    assert (folder / "context.txt").read_text() == "mine"
    cli("context", "second")
    assert (folder / "context.txt").read_text() == "second"
    assert (folder / "previous-context.txt").read_text() == "mine"


def test_a_foreign_context_is_not_replaced(cli: Cli) -> None:
    file = cli.folder / "config" / "nats" / "context" / "theirs.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('{"description": "production"}')
    assert "--force" in cli.error("context", "theirs")
    assert "production" in file.read_text()
    cli("context", "theirs", "--force")
    assert "millstream" in file.read_text()
    assert "letters" in cli.error("context", "../escape")


def test_secrets_are_not_printed_anywhere_else(cli: Cli) -> None:
    secrets = [cli.json("env", "--role", role)["NATS_PASSWORD"] for role in ("admin", "app")]
    shown = "".join(
        cli(*command).stdout
        for command in (["status", "--json"], ["status"], ["logs", "-n", "10000"], ["node", "ls"])
    )
    assert shown
    assert not [secret for secret in secrets if secret in shown]
