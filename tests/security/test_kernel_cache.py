"""Numba keeps compiled kernels as pickles, and to read one is to run it: only those are read that nobody else could write."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from numba.core import config
from numba.core.dispatcher import Dispatcher
from strangers import as_stranger, needs_stranger, street

from millpond.kernels import _jit
from millpond.txn.compiler import cache

pytestmark = pytest.mark.skipif(not _jit.JIT_ENABLED, reason="nothing is compiled")


class Kernel(NamedTuple):
    """A function to compile, and where numba keeps what it makes of it, below the directory that it is given."""

    function: Callable[[int], int]
    folder: Path
    kept: list[str]

    def use(self, directory: str | None) -> Any:
        """As a process does that has just started."""
        kernel: Any = _jit.compiled(self.function, directory)
        assert kernel(3) == 6
        return kernel.stats


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("kernel")
    file = folder / "doubling.py"
    file.write_text("def double(x):\n    return 2 * x\n")
    spec = importlib.util.spec_from_file_location("doubling", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Numba imports the module of what it finds in a cache, unless it happens to have it still.
    sys.modules["doubling"] = module
    place = folder / "place"
    place.mkdir(mode=0o700)
    kernel = Kernel(module.double, folder, [])
    assert kernel.use(str(place)).cache_misses
    assert kernel.use(str(place)).cache_hits
    kernel.kept.extend(str(path.relative_to(place)) for path in place.glob("*/*"))
    assert len(kernel.kept) == 2
    yield kernel
    del sys.modules["doubling"]


class Mark:
    """Whoever reads it from a pickle makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._folder,)


class Scene(NamedTuple):
    """A machine on which all users have their caches in one folder, and a pickle that tells if it was ever read."""

    common: Path
    mark: Path

    @property
    def name(self) -> str:
        """Of the directory for kernels: the same for all who run this very source."""
        directory = _jit.CACHE_DIRECTORY
        assert directory is not None
        return os.path.basename(directory)

    @property
    def base(self) -> Path:
        return self.common / "millpond"

    def plant(self, kernel: Kernel) -> None:
        """The stranger's pickle, under every name that numba would read, wherever the stranger can."""
        for name in kernel.kept:
            path = self.base / self.name / name
            as_stranger(f"mkdir -p {path.parent}; cp {self.common}/pickle {path}", self.common)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with street() as common:
        monkeypatch.setenv("XDG_CACHE_HOME", str(common))
        # A package that was installed where others can write: its own folder is no place.
        package = tmp_path / "package"
        package.mkdir()
        package.chmod(0o777)
        for file in Path(_jit.__file__).parent.glob("*.py"):
            shutil.copy(file, package)
        monkeypatch.setattr(_jit, "__file__", str(package / "_jit.py"))
        scene = Scene(common, tmp_path / "mark")
        (common / "pickle").write_bytes(pickle.dumps(Mark(scene.mark)))
        (common / "pickle").chmod(0o644)
        yield scene


@pytest.fixture
def umask_000() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_all(scene: Scene, kernel: Kernel) -> str:
    scene.common.chmod(0o777)
    return f"chmod go-w {scene.common} && rm -rf {scene.base}"


def prepared_by_a_stranger(scene: Scene, kernel: Kernel) -> str:
    scene.plant(kernel)
    return f"rm -rf {scene.base}"


def a_strangers_link(scene: Scene, kernel: Kernel) -> str:
    (scene.common / "mine").mkdir(mode=0o700)
    as_stranger(f"ln -s mine {scene.base}", scene.common)
    return f"rm -rf {scene.base}"


def open_once_and_mended_since(scene: Scene, kernel: Kernel) -> str:
    (scene.base / scene.name).mkdir(parents=True)
    scene.plant(kernel)
    for path in (scene.base, scene.base / scene.name):
        path.chmod(0o700)
    return f"rm -rf {scene.base}"


def open_now(scene: Scene, kernel: Kernel) -> str:
    (scene.base / scene.name).mkdir(parents=True)
    scene.base.chmod(0o700)
    return f"rm -rf {scene.base}"


@needs_stranger
@pytest.mark.parametrize("place", ["millpond", "."])
def test_what_is_a_strangers_is_not_ones_own_to_remove(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    scene.base.mkdir()
    os.chown(scene.common / place, 1, 1)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.warns(UserWarning, match=r"belongs to .*\n  hint: set XDG_CACHE_HOME to"):
        assert _jit.own_cache(str(scene.base), "kernels") is None


@needs_stranger
@pytest.mark.usefixtures("umask_000")
@pytest.mark.parametrize(
    "make",
    [open_to_all, prepared_by_a_stranger, a_strangers_link, open_once_and_mended_since, open_now],
    ids=lambda make: make.__name__,
)
def test_a_strangers_pickle_is_never_read(
    scene: Scene, kernel: Kernel, make: Callable[[Scene, Kernel], str]
) -> None:
    command = make(scene, kernel)
    for _ in range(2):
        with pytest.warns(UserWarning, match="not kept") as warned:
            directory = _jit._cache_directory()
        assert [str(warning.message).partition("hint: ")[2] for warning in warned] == [command]
        kernel.use(directory)
        scene.plant(kernel)
    kernel.use(directory)
    assert not scene.mark.exists()
    assert pickle.loads((scene.common / "pickle").read_bytes()) is None
    assert scene.mark.exists(), "it would have told"


@needs_stranger
@pytest.mark.usefixtures("umask_000")
def test_in_a_folder_such_as_tmp_a_cache_is_made_that_is_closed_to_others(
    scene: Scene, kernel: Kernel
) -> None:
    for hits in (0, 1):
        directory = _jit._cache_directory()
        assert directory == str(scene.base / scene.name)
        assert sum(kernel.use(directory).cache_hits.values()) == hits
        scene.plant(kernel)
    assert not scene.mark.exists()
    for path in (scene.base, scene.base / scene.name):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_package_that_is_closed_to_others_keeps_its_kernels_itself(scene: Scene) -> None:
    package = Path(_jit.__file__).parent
    package.chmod(0o755)
    assert _jit._cache_directory() == str(package / "__pycache__" / scene.name)


@pytest.mark.parametrize("locators", ["", "InTreeCacheLocator", "UserWideCacheLocator"])
def test_numba_finds_no_other_place_on_its_own(
    tmp_path: Path, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, locators: str
) -> None:
    """As it would where the directory cannot be written, or where it is told to."""
    monkeypatch.setattr(config, "CACHE_LOCATOR_CLASSES", locators, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "numbas"))
    mark = tmp_path / "mark"
    for name in kernel.kept:
        in_tree = kernel.folder / "__pycache__" / os.path.basename(name)
        in_tree.parent.mkdir(exist_ok=True)
        in_tree.write_bytes(pickle.dumps(Mark(mark)))
    (tmp_path / "file").touch()
    assert kernel.use(str(tmp_path / "file")).cache_path is None
    assert kernel.use(None).cache_path is None
    assert not mark.exists()
    assert not list(tmp_path.rglob("*.nb?"))
    assert str(tmp_path / "numbas") == config.CACHE_DIR, "the setting of others stays"


def test_every_kernel_is_kept_there_or_nowhere() -> None:
    import millpond.stores.undo
    import millpond.stores.versioned
    import millpond.txn.run.grouping  # noqa: F401 - whose kernels are looked at

    kernels = [
        value
        for name, module in list(sys.modules.items())
        if name.startswith(("millpond.kernels.", "millpond.stores.", "millpond.txn."))
        for value in vars(module).values()
        if isinstance(value, Dispatcher)
    ]
    assert len(kernels) > 30
    assert {os.path.dirname(kernel.stats.cache_path) for kernel in kernels} == {_jit.CACHE_DIRECTORY}


def test_a_user_without_a_home_keeps_nothing(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.warns(UserWarning, match="no home\n  hint: set XDG_CACHE_HOME"):
        assert _jit._cache_directory() is None
    assert sorted(tmp_path.iterdir()) == before


def test_a_umask_that_keeps_files_from_their_own_user_is_told(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        with pytest.warns(UserWarning, match="umask"):
            assert _jit.own_cache(str(tmp_path), "kernels") is None
    finally:
        os.umask(before)


@needs_stranger
def test_transactions_that_a_stranger_compiled_are_not_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = scene.common / "transactions"
    above.mkdir(mode=0o700)
    monkeypatch.setattr(cache, "_directory", lambda: str(above))
    file = cache.kept_source("text of one's own")
    assert file is not None
    assert Path(file).read_text() == "text of one's own"
    assert {stat.S_IMODE(path.stat().st_mode) for path in above.iterdir()} == {0o700}
    planted = Path(file).parent / "kernel_0" / "kernel.nbi"
    Path(file).parent.chmod(0o777)
    above.chmod(0o777)
    as_stranger(f"mkdir {planted.parent}; cp {scene.common}/pickle {planted}", above)
    assert planted.exists()
    Path(file).parent.chmod(0o700)
    above.chmod(0o700)
    with pytest.warns(UserWarning, match=f"rm -rf {above}"):
        assert cache.kept_source("text of one's own") is None
