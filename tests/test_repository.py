"""What every file of the repository keeps to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import millpond
from millpond.container.process import OWN_BYTES
from millpond.pond.opening import MEMORY_MIN
from millpond.wire import flight, gate, handshake, sieve

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


def imports_of(tree: ast.AST) -> Iterator[str]:
    """The outermost packages that a module imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.split(".")[0]


def test_no_module_unpickles() -> None:
    """To read a pickle is to run it. Numba's are its own, see `kernels/_jit.py`."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        found = {"pickle", "marshal", "shelve", "cloudpickle", "dill", "joblib"} & set(
            imports_of(ast.parse(path.read_text()))
        )
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


def named_tests(text: str) -> list[tuple[str, str]]:
    """Files of tests, and tests in them, that a text names: `file.py`, `file.py::test`, or `::test` of the file before."""
    found, file = [], ""
    for path, name in re.findall(r"`(tests/[\w/.]+\.py)?(?:::(\w+))?`", text):
        file = path or file
        if path or name:
            found.append((file, name))
    return found


def test_every_test_that_a_document_names_exists() -> None:
    for document in (ROOT / "SECURITY.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for file, name in named_tests(document.read_text()):
            assert (ROOT / file).is_file(), f"{document.name} names {file}"
            tree = ast.parse((ROOT / file).read_text())
            tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert any(test.startswith("test_") for test in tests), f"{file} has no test"
            assert not name or name in tests, f"{document.name} names {file}::{name}"


def test_names_of_tests_are_found() -> None:
    text = "`a`, `tests/x/test_a.py`, `tests/test_b.py::test_c`, `::test_d`, `src/e.py`"
    assert named_tests(text) == [
        ("tests/x/test_a.py", ""),
        ("tests/test_b.py", "test_c"),
        ("tests/test_b.py", "test_d"),
    ]


def test_each_line_of_the_security_policy_names_a_test() -> None:
    lines = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")]
    assert len(lines) > 20
    for line in lines[1:]:
        cells = line.strip("| ").split(" | ")
        assert len(cells) == 3, line
        assert cells[2].startswith("`tests/"), line
        assert named_tests(cells[2]), line


def test_the_numbers_of_the_documents_are_those_of_the_source() -> None:
    policy = (ROOT / "SECURITY.md").read_text()
    operations = (ROOT / "docs" / "operations.md").read_text()
    handshake_bytes = handshake.HELLO.size + handshake.PROOF_BYTES
    for number in (
        f"at most {gate.PENDING_MAX} handshakes of at most {handshake_bytes} bytes and {gate.HANDSHAKE_S:g} seconds",
        f"messages of more than {sieve.MESSAGE_BYTES_MAX >> 20} MiB",
        f"has more than {sieve.LARGE_BYTES >> 20} MiB under way in calls that it has not ended, for {sieve.LARGE_S:g} seconds",
        f"{gate.READERS_MAX} connections of the pond's {gate.CONNECTIONS_MAX}, and {flight.READING_CALLS_MAX} calls",
        f"nothing moves for {gate.READER_IDLE_S:g} seconds",
    ):
        assert number in policy, number
    for number in (f"at least {MEMORY_MIN >> 20} MiB", f"some {OWN_BYTES >> 20} MiB for itself"):
        assert number in operations, number
