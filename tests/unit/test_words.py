"""One word for one thing: retired words stay out of docs, help, errors, docstrings and test names.

The glossary of docs/ARCHITECTURE.md has the words in use.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
CODE = [
    path
    for folder in ("millstream", "tools", "bench", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Retired word -> what to write instead.
RETIRED: dict[str, str] = {
    r"\btold\b": "reported, given, asked",
    r"\bbur(y|ied|ies|ial|ials)\b": "dead-letter, dead-lettered",
    r"\banew\b": "again, from scratch",
    r"\bunless said\b": "by default",
    r"\bfor who\b": "for readers that, for clients that",
    r"\bwho(ever)? may\b(?! import)": "users that may",
    r"\bgoodbye\b": "cleanup",
    r"\bst(and|ands|ood|anding) still\b": "stalled, paused",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bis of (events|messages|files)\b": "applies to, requires",
    # As a verb and in fixed phrases the word is fine; as a noun it was seven different things.
    r"(?<!in )(?<!take )(?<!takes )(?<!took )(?<!in its )(?<!one )(?<!only )(?<!first )\bplaces?\b"
    r"(?! (it|them|the|a|an|each|new) )": "position, index, folder, slot",
}

# A lane is one of a writer's parallel fences, and nothing else: only these speak of writers.
LANE = re.compile(r"\blanes?\b", re.IGNORECASE)
ABOUT_WRITERS = {
    "bench/packs.py",
    "docs/API.md",
    "docs/ARCHITECTURE.md",
    "docs/CONCURRENCY.md",
    "docs/PACKS.md",
    "docs/PROMISES.md",
    "CHANGELOG.md",
    "millstream/blocking/generated/producing.py",
    "millstream/blocking/generated/topic.py",
    "millstream/events/fence.py",
    "millstream/messaging/processing/commits.py",
    "millstream/messaging/reading/verify.py",
    "millstream/messaging/topic.py",
}


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """What people read of a module: docstrings, help and messages; not identifiers or comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def names_of_tests(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:5] == "test_":
            yield node.lineno, node.name.replace("_", " ")


def found_in(texts: Iterator[tuple[int, str]], words: re.Pattern[str]) -> list[str]:
    return [f"line {line}: {hit[0]!r}" for line, text in texts for hit in words.finditer(text)]


ANY = re.compile("|".join(RETIRED), re.IGNORECASE)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines_of(page: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page without the names of code in them."""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        yield number, re.sub(r"`[^`]*`", "", line)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_uses_the_words_of_the_glossary(page: Path) -> None:
    assert not found_in(lines_of(page), ANY)
    if name_of(page) not in ABOUT_WRITERS:
        assert not found_in(lines_of(page), LANE)


@pytest.mark.parametrize("module", CODE, ids=name_of)
def test_a_module_speaks_in_the_words_of_the_glossary(module: Path) -> None:
    assert not found_in(texts_of(module.read_text()), ANY)
    if name_of(module) not in ABOUT_WRITERS and "/publishing/" not in name_of(module):
        assert not found_in(texts_of(module.read_text()), LANE)


@pytest.mark.parametrize("module", TESTS, ids=name_of)
def test_a_test_is_named_in_the_words_of_the_glossary(module: Path) -> None:
    assert not found_in(names_of_tests(module.read_text()), ANY)


@pytest.mark.parametrize(
    "text",
    ["the owner is told", "it is buried", "begins anew", "its place in the log", "a goodbye"],
)
def test_a_retired_word_is_found(text: str) -> None:
    assert ANY.search(text)


@pytest.mark.parametrize("text", ["edited in place", "takes place", "one place", "an old head"])
def test_other_words_are_not(text: str) -> None:
    assert not ANY.search(text)
