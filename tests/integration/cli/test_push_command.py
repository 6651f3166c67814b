"""millstream push: a subscription posted to an endpoint, its secrets, its failures, its end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.integration.cli.conftest import Cli, until
from tests.integration.cli.messaging_commands import Commands
from tests.integration.messaging.subscriptions.http_endpoint import Post, Say, endpoint


def test_events_are_posted_until_sigterm_with_secrets_that_no_list_of_processes_shows(
    cli: Cli, millstream_url: str, tmp_path: Path
) -> None:
    run = Commands(millstream_url)
    run("topic", "create", "alerts")
    run("subscription", "create", "alerts", "hook", "--backoff", "10ms")
    run("pub", "-t", "alerts", "-l", piped="good\nbad\nlater\n")
    secrets = tmp_path / "headers"
    secrets.write_text("X-Signature: hidden\n\n")
    cli.environment["MILLSTREAM_PUSH_BEARER"] = "token-1"

    def answer(post: Post, tries: int) -> Say:
        if post.body == b"bad":
            return Say(400, body=b"not that")
        return Say(503 if post.body == b"later" and tries == 1 else 200)

    with endpoint(answer) as web:
        url = f"{web.url}/hook?token=secret"
        process = cli.start(
            "push", "alerts", "hook", url, "--header-file", str(secrets), "-H", "X-Own: 1",
            "-s", millstream_url, "--json",
        )  # fmt: skip
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["subscription"] == "hook"
        until(lambda: sorted(web.bodies()) == [b"bad", b"good", b"later", b"later"])
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out) == {"delivered": 2, "retried": 1, "rejected": 1}
    headers = web.posts[0].headers
    assert headers["authorization"] == "Bearer token-1"
    assert (headers["x-signature"], headers["x-own"]) == ("hidden", "1")
    assert "HTTP 400 Bad Request" in err
    assert "HTTP 503" in err
    assert "secret" not in err
    assert run.json("dlq", "ls", "alerts", "hook")[0]["value"] == "bad"


def test_what_is_wrong_is_said_before_anything_is_taken(millstream_url: str) -> None:
    run = Commands(millstream_url)
    run("topic", "create", "alerts")
    run.error("push", "alerts", "hook", "http://127.0.0.1:1/")
    assert run.json("subscription", "ls") == []
    assert "https://host/path" in run.error("push", "alerts", "hook", "ftp://x")
    assert "password" in run.error("push", "alerts", "hook", "http://ann:pw@host/")
