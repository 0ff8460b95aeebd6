"""What every file of the repository keeps to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import millpond

ROOT = Path(__file__).resolve().parent.parent
MADE = {
    *(".git", "__pycache__", "build", "dist", ".pytest_cache", ".mypy_cache", ".ruff_cache"),
    *(".hypothesis", "spark-warehouse"),
}
SOMEONES_PATH = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/")


def files(folder: Path = ROOT) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in MADE or path.name.startswith(".venv") or path.suffix == ".egg-info":
            continue
        if path.is_dir():
            yield from files(path)
        elif path.is_file():
            yield path


def test_no_file_names_a_path_of_someones_machine() -> None:
    found = []
    for path in files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if SOMEONES_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_the_check_sees_such_paths() -> None:
    assert SOMEONES_PATH.search("see /" + "root/x")
    assert SOMEONES_PATH.search('"/' + 'home/someone/x"')
    assert not SOMEONES_PATH.search("https://example.org/" + "work/x")


def test_the_files_people_look_for_are_there() -> None:
    for name in (
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "README.md",
        "src/millpond/py.typed",
    ):
        assert (ROOT / name).is_file(), name
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_changelog_has_the_version() -> None:
    assert f"## [{millpond.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
