"""Runs every example of README.md and docs/, and the notebook, which can use their JVM.

- `python` blocks of a page run in order, in one namespace and one event loop; `await` may stand at
  the top level. A `text` block right after one is what it prints (`...` stands for anything).
- `sh` and `console` blocks: lines that start with `millstream` (or `.venv/bin/millstream`) are
  run with the real command; other lines of `sh` are not. In `console` commands start with `$ `, and
  other lines are the output of the command above them.
- A page finds a broker running in its own folder, unless it starts one itself with `millstream up`.
- A page that names postgresql://localhost/shop finds such a database there, and its `sql` blocks
  are run in it; the page is skipped where PostgreSQL is not installed.
- `not-run` after the language leaves a block out: for what does not end or needs other machines.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.postgres import Postgres, running_postgres

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "sh", "console", "text", "toml", "json", "ini", "sql", "yaml"}
SHOP = "postgresql://localhost/shop"
NOT_RUN_LIMIT = 6  # in all pages together; an example that is not run is soon wrong

_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int  # of its first line of code
    language: str
    run: bool
    body: str
    follows: bool  # only blank lines between it and the block before

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path, text: str) -> list[Block]:
    found = []
    end = -1
    for match in _FENCE.finditer(text):
        language, _, mark = match["info"].strip().partition(" ")
        line = text.count("\n", 0, match.start()) + 2
        follows = end >= 0 and not text[end : match.start()].strip()
        found.append(Block(page, line, language, mark != "not-run", match["body"], follows))
        end = match.end()
    return found


def commands_of(block: Block) -> Iterator[tuple[str, str | None]]:
    """Each `millstream` command of a shell block with its expected output, if any."""
    joined = block.body.replace("\\\n", " ").replace(".venv/bin/millstream", "millstream")
    if block.language == "sh":
        for line in joined.splitlines():
            if line.split() and line.split()[0] == "millstream":
                yield line, None
        return
    for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        if command.split()[0] == "millstream":
            yield command, output.rstrip("\n") or None


class Page:
    """The namespace, event loop, folder and broker that the examples of a page share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database: Postgres | None = None  # in place of SHOP
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.runner = asyncio.Runner()

    def sql(self, block: Block) -> None:
        if self.database is not None:
            with self.database.connect("shop") as connection:
                connection.execute(block.body.encode())

    def python(self, block: Block) -> str:
        source = "\n" * (block.line - 1) + block.body
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(source, str(block.page), "exec", flags=flags, dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            result = eval(code, self.names)
            if inspect.iscoroutine(result):
                self.runner.run(result)
        return printed.getvalue()

    def shell(self, command: str) -> str:
        place = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if self.database is not None:
            command = command.replace(SHOP, self.database.url_of("shop"))
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env={**os.environ, "PATH": place},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def run(self, blocks: list[Block]) -> None:
        printed = ""
        for block in blocks:
            if not block.run:
                continue
            if block.language == "python":
                printed = self.python(block)
            elif block.language == "sql":
                self.sql(block)
            elif block.language == "text" and block.follows and printed:
                expect(block, block.body, printed)
            elif block.language in {"sh", "console"}:
                for command, output in commands_of(block):
                    found = self.shell(command)
                    if output is not None:
                        expect(block, output, found)


def expect(block: Block, wanted: str, found: str) -> None:
    same = doctest.OutputChecker().check_output(wanted + "\n", found, _FLAGS)
    assert same, f"{block}: expected\n{wanted}\nfound\n{found}"


def starts_its_own_broker(blocks: list[Block]) -> bool:
    shells = [block for block in blocks if block.run and block.language in {"sh", "console"}]
    commands = [command for block in shells for command, _ in commands_of(block)]
    return any(command.split()[1:2] == ["up"] for command in commands)


@pytest.fixture
def empty_page(tmp_path: Path) -> Iterator[Page]:
    page = Page(tmp_path)
    with page.runner:
        yield page


@pytest.fixture
def page(empty_page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MILLSTREAM_PORT", "0")  # the default port may be in use
    monkeypatch.setenv("NATS_TIMEOUT", "30s")  # a busy broker is no fault of the page
    # A JVM that a page starts also serves later tests, with classes of their own.
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    for name in ("NATS_URL", "NATS_USER", "NATS_PASSWORD", "MILLSTREAM_DATA"):
        monkeypatch.delenv(name, raising=False)
    yield empty_page
    with contextlib.suppress(AssertionError):  # the page may have stopped it itself
        empty_page.shell("millstream down")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of(path: Path, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(path, path.read_text())
    if not any(block.run and block.language in {"python", "sh", "console"} for block in blocks):
        return
    if not starts_its_own_broker(blocks):
        state = json.loads(page.shell("millstream up --json"))
        monkeypatch.setenv("NATS_URL", state["url"])
    if not any(block.run and SHOP in block.body for block in blocks):
        page.run(blocks)
        return
    with running_postgres() as page.database:
        page.database.create_database("shop")
        page.run(blocks)


@pytest.mark.usefixtures("page")
def test_the_notebook_shows_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("examples.notebook", run_name="__main__", alter_sys=True)
    shown = capsys.readouterr().out
    assert 'ann {"customer":"ann","amount":106}' in shown
    assert 'ben {"customer":"ben","amount":6}' in shown


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_names_a_known_language(path: Path) -> None:
    text = path.read_text()
    unknown = [str(b) for b in blocks_of(path, text) if b.language not in LANGUAGES]
    assert not unknown
    assert text.count("\n```") % 2 == 0 or text.startswith("```")


def test_few_examples_are_left_out() -> None:
    left_out = [b for page in PAGES for b in blocks_of(page, page.read_text()) if not b.run]
    assert len(left_out) <= NOT_RUN_LIMIT, [str(block) for block in left_out]


SAMPLE = """Text.

```python
import asyncio
x = 1
print("one", await asyncio.sleep(0, result=x))
```

```text
one ...
```

```python not-run
raise RuntimeError
```

```sh
make test
millstream \\
  --version
```

```console
$ millstream --version
millstream ...
$ make lint
```
"""


def test_blocks_are_found_with_their_lines_and_run_in_order(empty_page: Page) -> None:
    blocks = blocks_of(ROOT / "README.md", SAMPLE)
    assert [(b.language, b.line, b.run, b.follows) for b in blocks] == [
        ("python", 4, True, False),
        ("text", 10, True, True),
        ("python", 14, False, True),
        ("sh", 18, True, True),
        ("console", 24, True, True),
    ]
    assert [command for b in blocks[3:] for command, _ in commands_of(b)] == [
        "millstream    --version",
        "millstream --version",
    ]
    empty_page.run(blocks)


@pytest.mark.parametrize(
    ("old", "new"),
    [("one ...\n", "two ...\n"), ("millstream ...\n", "brook ...\n"), ("\n  --version", " nono")],
)
def test_a_wrong_example_is_found(empty_page: Page, old: str, new: str) -> None:
    assert old in SAMPLE
    with pytest.raises(AssertionError):
        empty_page.run(blocks_of(ROOT / "README.md", SAMPLE.replace(old, new)))


def test_a_failing_example_points_at_its_line(empty_page: Page) -> None:
    text = "\n\n```python\n\n1 / 0\n```\n"
    with pytest.raises(ZeroDivisionError) as raised:
        empty_page.run(blocks_of(ROOT / "README.md", text))
    assert raised.traceback[-1].lineno + 1 == 5
