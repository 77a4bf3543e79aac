"""A certificate that nobody signed, for the servers of the tests."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(directory: Path, name: str) -> Path:
    """For ``name`` ("IP:127.0.0.1", "DNS:llm.example"), key included. Skips where there is no
    openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    path = directory / "both.pem"
    made = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x -addext"
    )
    command = [
        openssl,
        *made.split(),
        f"subjectAltName={name}",
        "-keyout",
        str(path),
        "-out",
        str(path),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return path
