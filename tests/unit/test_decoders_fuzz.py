"""Bytes from strangers: every decoder uses them or refuses them in Millstream's own words.

A short search by hypothesis; `make fuzz` searches longer, led by coverage.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.decoder_targets import TARGETS, check
from fuzz.pack_memory import mutate
from millstream.errors import ConfigError
from millstream.settings import parse_duration, parse_size, project_table, read_project_file
from millstream.wire.protocol import status_of

HOSTILE = (
    b"",
    b"\xff\xfe\xfd",
    b"{",
    b"[]",
    b"null",
    b"9" * 5000,
    b"[" * 20_000,
    b'{"a":' * 20_000,
    b"\0" * 64,
    b"NATS/1.0 " + b"9" * 5000 + b"\r\n\r\n",
    b"NATS/1.0\r\n" + b"a" * 70_000 + b": x\r\n\r\n",
    "\N{BYTE ORDER MARK}\N{RIGHT-TO-LEFT OVERRIDE}\N{SKULL}".encode(),
)


@pytest.mark.parametrize("name", list(TARGETS))
def test_the_seeds_of_a_decoder_and_hostile_bytes_are_taken_or_refused(name: str) -> None:
    for data in (*TARGETS[name].seeds, *HOSTILE):
        check(name, data)


@pytest.mark.parametrize("name", list(TARGETS))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.one_of(st.binary(max_size=300), st.text(max_size=100).map(str.encode)))
def test_any_bytes_are_taken_or_refused(name: str, data: bytes) -> None:
    check(name, data)


@pytest.mark.parametrize("name", list(TARGETS))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(chance=st.randoms(use_true_random=False), pick=st.integers(0, 99))
def test_seeds_with_faults_are_taken_or_refused(name: str, chance: object, pick: int) -> None:
    seeds = [seed for seed in TARGETS[name].seeds if seed]
    check(name, mutate(seeds[pick % len(seeds)], chance))  # type: ignore[arg-type]


def test_only_the_servers_own_status_is_one() -> None:
    assert status_of(b"NATS/1.0 503 No Responders\r\n\r\n") == (503, "No Responders")
    assert status_of(b"NATS/1.0 " + b"9" * 5000 + b"\r\n\r\n") == (0, "")
    assert status_of("NATS/1.0 ²²²\r\n\r\n".encode()) == (0, "")


@pytest.mark.parametrize("text", ["9" * 5000, "1" + "0" * 400 + "s", "-1", "", "1e9", "٣s", "1s1"])
def test_nonsense_is_not_a_duration(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_duration(text)


@pytest.mark.parametrize("part", ["9", "1m", "9.", "1m1"])
def test_a_long_text_is_refused_as_a_duration_quickly_and_briefly(part: str) -> None:
    """Any client may send one to a guard; quadratic time would take hours."""
    with pytest.raises(ConfigError, match="not a duration") as refused:
        parse_duration("/" + part * 500_000 + "/")
    assert len(str(refused.value)) < 200
    with pytest.raises(ConfigError, match="not a duration"):
        parse_duration(part * 500_000 + "/")


@pytest.mark.parametrize("text", ["9" * 5000, "1" + "0" * 400 + "MB", "-1", "", "1e9", "1XB"])
def test_nonsense_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"a = ",
        b"[broker",
        b"a = " + b"[" * 20_000,
        b"broker = 5",
        b"\0",
        b"a = 1\na = 2",
        b"broker = '''",
    ],
)
def test_a_project_file_of_nonsense_is_refused_with_its_name(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "millstream.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"millstream\.toml"):
        project_table("broker", file)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=200))
def test_any_project_file_is_taken_or_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "millstream.toml"
    file.write_bytes(content)
    with contextlib.suppress(ConfigError):
        read_project_file(file)
