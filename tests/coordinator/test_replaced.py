"""A coordinator whose root another one has opened, past every lock: it answers nobody, and touches no file any more."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millpond.coordinator.detector import LEASE_S
from millpond.errors import MillpondError, PondInUse, Unavailable
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.house import Locate

ROOT = "/pond"
KEYS = 20


def rows(epoch: int) -> pa.Table:
    return pa.table({"k": range(KEYS), "t": [epoch] * KEYS, "v": [epoch] * KEYS})


def fed(pond: LocalPond, epoch: int) -> None:
    state = pond.state("s", key="long", value="long")
    state.update(key="k", at="t", value="v", name="feed")(rows(epoch), epoch)
    accounts = pond.table("accounts", key="long", value="balance long")
    assert accounts.read([1]).num_rows == 0


def answers(pond: LocalPond) -> list[int]:
    pond.state("s").finish("feed")
    values: list[int] = pond.state("s").snapshot()["value"].to_pylist()
    return values


def every_file(files: LossyFiles, folder: str = ROOT) -> set[str]:
    if not files.is_dir(folder):
        return {folder}
    return {found for name in files.list(folder) for found in every_file(files, f"{folder}/{name}")}


@pytest.fixture
def two() -> tuple[LossyFiles, LocalPond, LocalPond]:
    """The first has an epoch in its logs, on which the second goes on."""
    files = LossyFiles()
    first = LocalPond(files, ROOT, 2)
    fed(first, 0)
    first.coordinator.beat()
    second = LocalPond(files, ROOT, 2)
    fed(second, 1)
    return files, first, second


@pytest.mark.parametrize("notices_first", [True, False])
def test_its_containers_end_and_no_file_goes(
    two: tuple[LossyFiles, LocalPond, LocalPond], notices_first: bool
) -> None:
    files, first, second = two
    before = every_file(files)
    if notices_first:
        first.coordinator.maintain()
        assert first.coordinator.is_replaced
        assert not first.hosting.services, "they would answer from what was"
    first.close()
    assert not first.hosting.services
    assert before <= every_file(files), "the other one rests on them"
    # What the second has not snapshotted is read from the first one's logs when it opens again.
    for container in (0, 1):
        second.hosting.kill(container)
        second.coordinator.recover(container)
    assert answers(second) == [1] * KEYS
    second.close()
    reopened = LocalPond(files, ROOT, 1)
    assert answers(reopened) == [1] * KEYS
    reopened.close()


def test_it_refuses_all_that_it_is_asked(two: tuple[LossyFiles, LocalPond, LocalPond]) -> None:
    _, first, second = two
    state, accounts = first.state("s"), first.table("accounts")
    first.coordinator.maintain()
    for ask in (state.snapshot, lambda: accounts.read([1]), state.progress, first.placement, first.metrics):
        with pytest.raises(PondInUse, match="another coordinator") as raised:
            ask()
        assert raised.value.hint
    with pytest.raises(PondInUse):
        first.coordinator.call(Locate())
    assert answers(second) == [1] * KEYS
    first.close()
    second.close()


def test_containers_that_it_does_not_reach_answer_nobody_after_their_lease(
    two: tuple[LossyFiles, LocalPond, LocalPond], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Spark task, or a machine, that does not hear that it should end them."""
    files, first, second = two
    state, accounts = first.state("s"), first.table("accounts")
    services = dict(first.hosting.services)
    state.snapshot()
    monkeypatch.setattr(first.hosting, "stop", lambda: None)
    monkeypatch.setattr(type(first.coordinator._containers.live[0].connection), "close", lambda self: None)
    before = every_file(files)
    first.coordinator.maintain()
    for service in services.values():
        service._runtime.sleep(LEASE_S + 0.1)
    first.coordinator.beat()
    for ask in (state.snapshot, lambda: accounts.read([1])):
        with pytest.raises(MillpondError) as raised:
            ask()
        assert isinstance(raised.value, Unavailable | PondInUse)
    for service in services.values():
        with pytest.raises(Unavailable, match="has not heard of its coordinator"):
            service._lease.check()
        assert service.maintain(), "upkeep would remove files"
    assert before <= every_file(files)
    second.close()
