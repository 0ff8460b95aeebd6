"""Every Python block of the README and the docs runs, in order, and prints what the block after it shows."""

from __future__ import annotations

import contextlib
import io
import itertools
import linecache
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = [
    REPOSITORY / "README.md",
    REPOSITORY / "SECURITY.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: Path) -> list[tuple[str, str | None]]:
    """Each Python block, and the output that the plain block right after it promises."""
    text = document.read_text()
    found = list(BLOCK.finditer(text))
    pairs: list[tuple[str, str | None]] = []
    for block, after in itertools.zip_longest(found, found[1:]):
        if block[1] == "python":
            follows = after is not None and after[1] == "" and not text[block.end() : after.start()].strip()
            pairs.append((block[2], after[2] if after is not None and follows else None))
    return pairs


def run_blocks(document: Path) -> None:
    """Runs the blocks of a document in the present directory."""
    names: dict[str, object] = {}
    for number, (code, promised) in enumerate(blocks(document)):
        out = io.StringIO()
        # As in a notebook: the source of what a block defines can be found.
        name = f"<{document.name} block {number}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        with contextlib.redirect_stdout(out):
            exec(compile(code, name, "exec"), names)
        if promised is not None:
            assert out.getvalue() == promised, out.getvalue()


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if blocks(path)], ids=lambda path: path.stem)
def test_every_block_runs(document: Path, tmp_path: Path) -> None:
    # In a process of its own: paths of a Spark that runs already lead to where it was started.
    settings = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, __file__, str(document)]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} -> {target}"


def test_paths_named_in_documents_exist() -> None:
    for document in DOCUMENTS:
        for path in re.findall(r"`((?:tests|src|docs)/[\w/.]+\.\w+)`", document.read_text()):
            assert (REPOSITORY / path).exists(), f"{document.name} names {path}"


if __name__ == "__main__":
    run_blocks(Path(sys.argv[1]))
