"""Who sees the pond's root is known by its landmark, and by nothing else."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import millpond as mp
from millpond.coordinator.service import CoordinatorService
from millpond.durable.files import OsFiles
from millpond.durable.landmark import check_root, make_landmark, remove_landmarks, why_unseen
from millpond.errors import RootUnseen
from millpond.runtime import Serial, Threads
from millpond.testing import LossyFiles
from millpond.testing.local import LocalHosting, LocalPond

FILES = OsFiles()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "pond"
    root.mkdir(mode=0o700)
    return root


def made(root: Path) -> tuple[str, Path]:
    landmark = make_landmark(FILES, str(root), Threads().bits)
    (path,) = root.glob("landmark-*")
    return landmark, path


def test_it_is_seen_where_it_was_made_and_is_its_owners_alone(root: Path) -> None:
    landmark, path = made(root)
    assert why_unseen(str(root), landmark) == why_unseen(str(root), landmark, FILES) == ""
    assert path.stat().st_mode & 0o777 == 0o600
    check_root(str(root), landmark, "this test")


def test_another_open_makes_another_and_the_last_one_counts_no_more(root: Path) -> None:
    first, path = made(root)
    second, other = made(root)
    assert (first != second, path != other, path.exists()) == (True, True, False)
    assert why_unseen(str(root), first)
    assert not why_unseen(str(root), second)
    remove_landmarks(FILES, str(root))
    assert os.listdir(root) == []


def test_another_directory_at_the_path_is_noticed(root: Path, tmp_path: Path) -> None:
    landmark, path = made(root)
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    assert "another directory" in why_unseen(str(other), landmark)
    make_landmark(FILES, str(other), Threads().bits)
    assert "another directory" in why_unseen(str(other), landmark)
    (other / path.name).write_text("0" * 32)
    (other / path.name).chmod(0o600)
    assert "another content" in why_unseen(str(other), landmark)
    assert why_unseen(str(tmp_path / "nowhere"), landmark) == "it is not there"
    for told in ("", "../../etc/passwd", landmark.upper() + "x"):
        assert "no landmark" in why_unseen(str(root), told)


def test_a_root_that_is_not_this_users_alone_is_not_taken_for_it(root: Path, tmp_path: Path) -> None:
    landmark, path = made(root)
    (tmp_path / "link").symlink_to(root)
    assert "links" in why_unseen(str(tmp_path / "link"), landmark)
    path.chmod(0o644)
    assert "open to others" in why_unseen(str(root), landmark)
    path.chmod(0o600)
    root.chmod(0o755)
    assert "open to others" in why_unseen(str(root), landmark)


def test_who_must_see_it_says_which_path_and_where(root: Path) -> None:
    with pytest.raises(RootUnseen) as caught:
        check_root(str(root), "0" * 32, "container 3")
    error = caught.value
    assert (error.root, error.host) == (str(root), socket.gethostname())
    assert f"container 3 on {socket.gethostname()} does not see the pond's root {root}:" in error.message
    assert error.hint


def test_a_container_that_has_another_root_is_refused_and_writes_nothing() -> None:
    files = LossyFiles()
    files.make_dir("/elsewhere")
    hosting = LocalHosting(files, "/elsewhere")
    starts: list[int] = []
    start = hosting.start
    hosting.start = lambda container, term: (starts.append(container), start(container, term))[1]  # type: ignore[method-assign]
    coordinator = CoordinatorService(files, "/pond", hosting.dial, Serial())
    with pytest.raises(RootUnseen, match=r"container 0 on .* /elsewhere: it is another directory"):
        coordinator.start(hosting, 1, 4)
    assert files.list("/elsewhere") == []
    assert starts == [0], "to start it once more would not help"
    coordinator.close()


def test_a_pond_has_one_while_it_is_open(tmp_path: Path) -> None:
    with mp.open(tmp_path / "pond", threads=1, slices=2) as pond:
        placement = pond._client.placement()
        assert why_unseen(placement.root, placement.landmark) == ""
    assert why_unseen(placement.root, placement.landmark)
    assert not list((tmp_path / "pond").glob("landmark-*"))


def test_what_a_killed_pond_left_is_replaced() -> None:
    files = LossyFiles()
    first = LocalPond(files)._client.placement().landmark
    second = LocalPond(files.crash())._client.placement().landmark
    assert first != second
