"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

__all__ = ["make_certificate"]


def make_certificate(
    folder: Path,
    name: str = "server",
    names: str | None = "IP:127.0.0.1",
    signed_by: str | None = None,
) -> Path:
    """Write NAME.pem and NAME.key, for these alternative names; the path of the certificate.

    It is signed by itself, or else by the certificate of that name in the same folder.
    """
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-days", "2", "-subj", f"/CN={name}"),
        *("-keyout", f"{name}.key", "-out", f"{name}.pem"),
    ]
    if names is not None:
        command += ["-addext", f"subjectAltName={names}"]
    if signed_by is not None:
        command += ["-CA", f"{signed_by}.pem", "-CAkey", f"{signed_by}.key"]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"openssl cannot make certificates here: {done.stderr}")
    return folder / f"{name}.pem"
