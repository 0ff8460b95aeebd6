"""Every Python block of the README and the docs runs, in order, and prints what the block after it shows."""

from __future__ import annotations

import contextlib
import io
import itertools
import linecache
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import millpond as mp

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
    try:
        for number, (code, promised) in enumerate(blocks(document)):
            out = io.StringIO()
            # As in a notebook: the source of what a block defines can be found.
            name = f"<{document.name} block {number}>"
            linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
            with contextlib.redirect_stdout(out):
                exec(compile(code, name, "exec"), names)
            if promised is not None:
                assert out.getvalue() == promised, out.getvalue()
    finally:
        for pond in (left for left in names.values() if isinstance(left, mp.Pond)):
            pond.close()


@pytest.fixture
def spark_starts_here(spark: SparkSession, tmp_path: Path) -> Iterator[None]:
    """A document starts Spark itself, as its reader does; in the Java machine of the other tests, which is warm."""
    java = spark.sparkContext._jvm
    assert java is not None
    files = java.org.apache.hadoop.fs.FileSystem.get(spark.sparkContext._jsc.hadoopConfiguration())

    def lead_to(directory: str) -> str:
        """Relative paths of data and of checkpoints, which Spark finds each in its own way. Returns where they led."""
        files.setWorkingDirectory(java.org.apache.hadoop.fs.Path(directory))
        return java.java.lang.System.setProperty("user.dir", directory)

    before = lead_to(str(tmp_path))
    spark.stop()
    yield
    left = SparkSession.getActiveSession()
    if left is not None:
        left.stop()
    lead_to(before)


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if blocks(path)], ids=lambda path: path.stem)
def test_every_block_runs(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if "SparkSession" in document.read_text():
        request.getfixturevalue("spark_starts_here")
    run_blocks(document)


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} -> {target}"


def test_paths_named_in_documents_exist() -> None:
    for document in DOCUMENTS:
        for path in re.findall(r"`((?:tests|src|docs)/[\w/.]+\.\w+)`", document.read_text()):
            assert (REPOSITORY / path).exists(), f"{document.name} names {path}"
