"""Which container serves which slices: those that come up get theirs, and slices change hands."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from millpond.container.layout import backup_directory_name, directory_name
from millpond.coordinator import moves, placement, switches
from millpond.coordinator.homes import Homes
from millpond.coordinator.membership import Membership
from millpond.coordinator.memory import Memory
from millpond.coordinator.moves import Move
from millpond.coordinator.records import PondRecord
from millpond.coordinator.switches import Switch
from millpond.coordinator.telling import Telling
from millpond.errors import CorruptFile, MillpondError, Unavailable
from millpond.runtime import Runtime
from millpond.wire.backups import SWITCH_S, Demote, Promote
from millpond.wire.base import LONG_CALL_S, Call, SliceId, Term
from millpond.wire.connection import Connection, Dialer
from millpond.wire.house import Adopt, Assign, Confirm, ContainerInfo, Placement, Release

_log = logging.getLogger("millpond")
REBUILT_S = 60.0
"""So long after a slice was rebuilt by another container, nobody else rebuilds it if that one ends, too."""


class Slices:
    """Gives containers their slices (an `Assignment`). Whoever holds `moving` sees none on their way.

    `present` tells of which incarnations there are files.
    """

    def __init__(
        self,
        memory: Memory,
        telling: Telling,
        dial: Dialer,
        present: Callable[[], Collection[str]],
        runtime: Runtime,
    ) -> None:
        self._present = present
        self.containers = Membership(dial, self, runtime)
        self._memory = memory
        self._telling = telling
        self._runtime = runtime
        self.moving = runtime.lock()
        self.landmark = ""
        """By which others know the root; there is one before a container comes up."""
        self._orders = 0
        self._move: Move | None = None
        # Those that ended with somebody astray.
        self._switches: list[Switch] = []
        self.promoted = 0
        self._versions = placement.Versions()
        self.homes = Homes()
        """Guarded by the memory's lock."""
        # When slices were last rebuilt by another than their owner.
        self._rebuilt_s: dict[SliceId, float] = {}
        self.threads = 0

    def order(self) -> int:
        """Numbers what containers are told of slices: what comes late counts no more."""
        with self._memory.lock:
            self._orders += 1
            return self._orders

    # Containers that come up

    def next_term(self) -> Term:
        with self._memory.lock:
            # From here on, nothing that an earlier incarnation prepared counts unless it is decided.
            self._memory.write(placement.next_term(self._memory.record))
            return self._memory.record.term

    def assign(self, container: int, term: Term, connection: Connection, careful: Term) -> None:
        with self._memory.lock:
            self._rest_on_backups()
            record = self._memory.record
            known = self._telling.residents()
        slices = record.slices_of(container)
        residents = list(known.values())
        connection.call(Assign(term, container, record.slices, residents, self.threads, self.landmark))
        self._have_rebuilt(connection, record, slices, careful)
        while True:
            with self._memory.lock:
                now = self._memory.record
                mine = [number for number in now.slices_of(container) if number in slices]
                news = self._telling.news(known)
                if not news and mine == slices:
                    now = placement.without_ended(now, {**self.containers.members.serving, container: term})
                    self._memory.write(placement.kept_in(now, directory_name(term, container), slices))
                    self._telling.learnt(container, known)
                    break
                known = self._telling.residents()
            # Something changed while it came up.
            for call in news:
                connection.call(call)
            if mine != slices:
                connection.call(Release(self.order(), [number for number in slices if number not in mine]))
                slices = mine
        connection.call(Confirm(self.order(), slices))

    def _have_rebuilt(
        self, connection: Connection, record: PondRecord, slices: Sequence[SliceId], careful: Term
    ) -> None:
        """Has a container that comes up rebuild its slices; those of which files are damaged, from a backup's.

        The journal need not know: what they rest on is entered when the container has them.
        """

        def adopt(directories: Mapping[SliceId, str]) -> None:
            connection.call(
                Adopt(self.order(), dict(directories), record.decided(), careful, _epochs(record))
            )

        own = placement.directories_of(record, slices)
        try:
            adopt(own)
        except CorruptFile:
            present = sorted(set(record.backups).intersection(self._present()))
            others = {number: [d for d in present if number in record.backups[d]] for number in slices}
            if not any(others.values()):
                raise
        else:
            return
        # One by one: each as far as its own files, or a backup's, are whole.
        for number in slices:
            try:
                adopt({number: own[number]})
            except CorruptFile as error:
                if not self._adopts_any([{number: directory} for directory in others[number]], adopt):
                    raise
                _log.warning("slice %d was rebuilt from a backup: %s", number, error.message)

    @staticmethod
    def _adopts_any(
        choices: Sequence[Mapping[SliceId, str]], adopt: Callable[[Mapping[SliceId, str]], None]
    ) -> bool:
        for directories in choices:
            with suppress(CorruptFile):
                adopt(directories)
                return True
        return False

    def _rest_on_backups(self) -> None:
        """Slices whose owner does not serve, and whose files are lost, rest on those of their backups."""
        record, serving = self._memory.record, self.containers.members.serving
        away = [SliceId(number) for number, owner in enumerate(record.owners) if owner not in serving]
        if record.backups and away:
            rested = placement.rest_on_backups(record, away, self._present())
            if rested is not record:
                self._memory.write(rested)

    # Slices that change hands

    @property
    def astray(self) -> bool:
        """Whether a container may serve other slices than the journal says."""
        return bool(self._switches) or (self._move is not None and bool(self._move.astray))

    def is_backed(self, container: int) -> bool:
        record = self._memory.record
        held = placement.holders(record, self.containers.members.serving)
        return all(held[number] for number in record.slices_of(container))

    def relieve(self, container: int) -> None:
        """Has others serve the slices of a container that is gone: backups, as far as there are, and for the rest peers
        that rebuild them from the root; all at the same time.
        """
        with self._memory.lock:
            record = self._memory.record
            held = placement.holders(record, self.containers.members.serving)
            holders = {number: held[number] for number in record.slices_of(container)}
        self._hand_over(container, holders, from_root=False)
        with self._memory.lock:
            self._rest_on_backups()
            record = self._memory.record
            # Who is told to release slices in the same moment may be told so of these.
            moving = (
                set() if self._move is None or self._move.is_over else {self._move.source, self._move.target}
            )
            peers = sorted(set(self.containers.members.serving) - moving)
            # Whoever ended soon after it had rebuilt slices of another may have ended over them: these end nobody else.
            recent_s = self._runtime.now() - REBUILT_S
            suspect = {number for number, at_s in self._rebuilt_s.items() if at_s > recent_s}
            code = {
                number
                for known in record.residents.values()
                if known.spec.replays_code
                for number in known.spec.places(record.slices)
            }
            # Nor does user code, from a log that has to run again: who had it runs it.
            rest = [number for number in record.slices_of(container) if number not in code | suspect]
        for number in self._hand_over(container, dict.fromkeys(rest, peers), from_root=True):
            self._rebuilt_s[number] = self._runtime.now()

    def _hand_over(
        self, container: int, holders: Mapping[SliceId, Sequence[int]], *, from_root: bool
    ) -> list[SliceId]:
        """Has each slice served by one of those who can, as evenly as can be. Those that went."""
        record = self._memory.record
        counts = Counter(record.owners) if from_root else Counter[int]()
        targets: dict[int, list[SliceId]] = {}
        for number, held in holders.items():
            able = [each for each in held if each != container]
            if able:
                chosen = min(able, key=lambda each: counts[each])
                counts[chosen] += 1
                targets.setdefault(chosen, []).append(number)
        if not targets:
            return []
        switch = Switch(container, targets, live=False, from_root=from_root)
        self.drive(switch)
        self.promoted += len(switch.moved)
        return switch.moved

    def drive(self, switch: Switch, until: switches.Phase | None = None) -> None:
        """Until all is done, but for whoever has to begin anew: that is left to `call_home`. Or until that phase: to go on,
        drive it again.
        """
        while switch.phase not in (switches.Phase.SETTLE, switches.Phase.RECALL):
            if switch.phase is until:
                return
            effects = switch.effects()
            if not effects:
                return
            for event in self._runtime.map(partial(self._switch, switch), effects):
                switch.on(event)
        with self._memory.lock:
            # An order that came to nothing may be carried out late, in the middle of an epoch: none counts that they prepare.
            for container in switch.astray:
                self.containers.members.ended(container)
        self._switches.append(switch)

    def _switch(self, switch: Switch, effect: switches.Effect) -> switches.Event:
        container = getattr(effect, "container", switch.source)
        try:
            match effect:
                case switches.Promote(container, slices):
                    record = self._memory.record
                    limit_s = SWITCH_S if switch.live else LONG_CALL_S
                    ask = Promote(self.order(), list(slices), record.decided(), _epochs(record), limit_s)
                    return switches.Obeyed(container, self.ask(container, ask))
                case switches.Rebuild(container, slices):
                    record = self._memory.record
                    left = dict(placement.directories_of(record, slices))
                    adopt = Adopt(self.order(), left, record.decided(), epochs=_epochs(record))
                    return switches.Obeyed(container, self.ask(container, adopt))
                case switches.Demote(container, slices):
                    return switches.Obeyed(container, self.ask(container, Demote(self.order(), list(slices))))
                case switches.Enter():
                    self._enter_switch(switch, effect)
                case switches.Confirm(container, slices):
                    return switches.Obeyed(
                        container, self.ask(container, Confirm(self.order(), list(slices)))
                    )
                case moves.Settle():
                    self._memory.settle()
                case moves.Recall(container):
                    self.containers.recover(container, broken=True)
                    return moves.Home(container)
        except MillpondError as error:
            return switches.Failed(container, error)
        except OSError as error:
            return switches.Failed(container, self._memory.not_written(error))
        return switches.Obeyed(container, Term(0))

    def ask(self, container: int, message: Call[Any]) -> Term:
        """Asks the incarnation that serves now, and does not wait for another; which it was."""
        live = self.containers.live.get(container)
        if live is None:
            raise Unavailable(f"container {container} is not up", address="")
        live.connection.call(message)
        return live.term

    def _enter_switch(self, switch: Switch, effect: switches.Enter) -> None:
        with self._memory.lock:
            record, members = self._memory.record, self.containers.members
            for container, (term, slices) in effect.targets.items():
                if not members.serves(container, term):
                    raise Unavailable(f"container {container} was restarted", address="")
                if any(record.owners[number] != effect.source for number in slices):
                    raise Unavailable("the slices went elsewhere", address="")
                record = placement.handed_to(record, container, directory_name(term, container), slices)
                record = placement.without_backups(record, [backup_directory_name(term, container)], slices)
            if effect.demoted is not None:
                if not members.serves(effect.source, effect.demoted):
                    raise Unavailable(f"container {effect.source} was restarted", address="")
                moved = [number for _, slices in effect.targets.values() for number in slices]
                directory = backup_directory_name(effect.demoted, effect.source)
                record = placement.backed_up_in(record, directory, moved)
            elif switch.live or members.serves(effect.source, members.term_of(effect.source)):
                raise Unavailable(f"container {effect.source} serves", address="")
            self._memory.write(record)
            if not switch.live:
                taken = {n: c for c, (_, slices) in effect.targets.items() for n in slices}
                self.homes.left(effect.source, taken)

    def place(self, owners: Sequence[int]) -> None:
        """Gives slices to those owners. The caller sees to it that no epoch is on its way."""
        with self.moving:
            self.call_home()
            for (source, target), slices in placement.moves(self._memory.record.owners, owners).items():
                self._move = Move(source, target, slices)
                self._drive(self._move)
                if self._move.error is not None:
                    raise self._move.error

    def call_home(self) -> None:
        """Containers that are astray begin anew, with the slices that the journal says."""
        with self.moving:
            move = self._move
            if move is not None and move.astray:
                move.go_home()
                self._drive(move)
                if move.error is not None and move.astray:
                    raise move.error
            for switch in list(self._switches):
                switch.go_home()
                while effects := switch.effects():
                    for event in self._runtime.map(partial(self._switch, switch), effects):
                        switch.on(event)
                if not switch.astray:
                    self._switches.remove(switch)

    def _drive(self, move: Move) -> None:
        while effects := move.effects():
            for event in self._runtime.map(self._carry_out, effects):
                move.on(event)

    def _carry_out(self, effect: moves.Effect) -> moves.Event:
        try:
            match effect:
                case moves.Release(container, slices):
                    self.containers.ask_patiently(container, Release(self.order(), list(slices)))
                case moves.Adopt(container, slices):
                    return self._adopt(container, slices)
                case moves.Enter():
                    self._enter(effect)
                case moves.Confirm(container, slices):
                    self.containers.ask_patiently(container, Confirm(self.order(), list(slices)))
                case moves.Settle():
                    self._memory.settle()
                case moves.Recall(container):
                    self.containers.recover(container, broken=True)
                    return moves.Home(container)
        except MillpondError as error:
            return moves.Failed(error)
        except OSError as error:
            return moves.Failed(self._memory.not_written(error))
        return moves.Obeyed()

    def _adopt(self, container: int, slices: Sequence[SliceId]) -> moves.Event:
        # Of what it should have dropped, nothing may be left to adopt.
        self._telling.catch_up(self.containers, container)
        record = self._memory.record
        directories = placement.directories_of(record, slices)
        try:
            term, _ = self.containers.ask_incarnation(
                container, Adopt(self.order(), dict(directories), record.decided(), epochs=_epochs(record))
            )
        except CorruptFile as error:
            now = self._memory.record
            stale = directories != placement.directories_of(now, slices) or _births(record) != _births(now)
            return moves.Failed(error, stale=stale)
        return moves.Adopted(term)

    def _enter(self, effect: moves.Enter) -> None:
        container, term, slices, source = effect
        with self._memory.lock:
            if not self.containers.members.serves(container, term):
                raise Unavailable(f"container {container} was restarted", address="")
            before = self._memory.record
            if any(before.owners[number] != source for number in slices):
                # The source ended, and who held a backup serves them: it was not told to release them.
                raise Unavailable("the slices went elsewhere", address="")
            after = [container if n in slices else owner for n, owner in enumerate(before.owners)]
            record = placement.placed(before, after)
            # Who serves a slice holds no backup of it.
            record = placement.without_backups(record, [backup_directory_name(term, container)], slices)
            self._memory.write(placement.kept_in(record, directory_name(term, container), slices))

    def locate(self, root: str, known: int | None = None) -> Placement:
        """Whoever asks may have missed a container. Who knows an earlier version gets what has changed, if that is little."""
        if self.containers.members.due(self._runtime.now()):
            self._runtime.spawn(self.containers.retry, "millpond-retry")
        with self._memory.lock:
            record = self._memory.record
            news = self._versions.since(record, known)
        live = sorted(self.containers.live.items())
        containers = [
            ContainerInfo(
                c, each.host.pid, each.host.address, tuple(record.slices_of(c)) if news is None else ()
            )
            for c, each in live
        ]
        away = {
            c: member.error.message
            for c, member in list(self.containers.members.members.items())
            if c not in self.containers.live and member.error is not None
        }
        owners = list(record.owners) if news is None else []
        whole = Placement(root, record.version, owners, containers, self.landmark, away)
        return whole if news is None else replace(whole, since=known, changed=news)


def _epochs(record: PondRecord) -> dict[str, int]:
    return {name: resident.epochs for name, resident in record.residents.items()}


def _births(record: PondRecord) -> dict[str, int]:
    return {name: resident.born for name, resident in record.residents.items()}
