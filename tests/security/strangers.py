"""Another user of the machine, who has no token. Tests play it where they are root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STRANGER = 65534
needs_stranger = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def as_stranger(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a line of shell as the stranger, in a folder; what it must not do fails there."""
    return subprocess.run(
        ["/bin/sh", "-c", f"umask 000; {command}"],
        cwd=folder,
        user=STRANGER,
        group=STRANGER,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=30,
    )


@contextmanager
def street(mode: int = 0o1777) -> Iterator[Path]:
    """A folder where every user of the machine comes by; pytest's own are closed to them."""
    folder = Path(tempfile.mkdtemp(prefix="millpond-street-"))
    try:
        folder.chmod(mode)
        yield folder
    finally:
        shutil.rmtree(folder)
