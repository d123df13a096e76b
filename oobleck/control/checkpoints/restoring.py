"""Which checkpoint to go back to: the newest of which the workers can read all layers.

Workers are asked which states they see, in memory and on disk; their answers are combined by name. If a layer of a
checkpoint turns out to be broken, the run goes back to the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from oobleck.control import protocol
from oobleck.control.events import Turn
from oobleck.planner import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCheckpoint:
    """A complete checkpoint in the run's directory."""

    name: str
    step: int
    saved_at: str
    is_final: bool = False
    """Its run had nothing more to train. It stays, whatever the limit."""


def in_order(known: Collection[KnownCheckpoint], *, run: str) -> list[KnownCheckpoint]:
    """Sort checkpoints from old to new, without repetition: first those that a run continues from, in their order."""
    # Generations of different runs do not compare, so checkpoints of earlier runs keep the order in which they came.
    others = {each.name: each for each in known if protocol.run_of(each.name) != run}
    own = {each.name: each for each in known if protocol.run_of(each.name) == run}
    return [*others.values(), *sorted(own.values(), key=lambda each: (protocol.generation_of(each.name), each.step))]


@dataclass(slots=True)
class Candidate:
    """A state that a run can go back to."""

    name: str
    run: str
    step: int
    saved_at: str
    directory: str | None
    position: protocol.DataPosition | None = None
    origin: str | None = None
    is_final: bool = False
    is_on_disk: bool = False
    held: dict[WorkerId, frozenset[int]] = field(default_factory=dict)
    """The layers that each worker can read."""

    @property
    def restore(self) -> protocol.Restore:
        return protocol.Restore(name=self.name, directory=self.directory)

    def covers(self, num_layers: int) -> bool:
        return len(frozenset().union(*self.held.values())) == num_layers


class Restoring:
    """The question under way, its answers, and the broken checkpoints."""

    def __init__(self, *, run: str, directory: str | None) -> None:
        """`directory` is another place to look in: a checkpoint or a directory of checkpoints."""
        self._run = run
        self._directory = directory
        self._request = 0
        self._asked: frozenset[WorkerId] = frozenset()
        self._answers: dict[WorkerId, protocol.CheckpointsFound] = {}
        self._broken: set[str] = set()
        self._reported: set[str] = set()
        self._origin: str | None = None
        """The checkpoint that this run began from."""

    def ask(self, turn: Turn, worker_ids: Collection[WorkerId]) -> None:
        """Ask workers which states they can restore."""
        self._request += 1
        self._asked = frozenset(worker_ids)
        self._answers = {}
        self._send_question(turn, self._asked)

    def ask_again(self, turn: Turn, node: str) -> None:
        # The first question may be lost with the connection over which it was sent.
        unanswered = self._asked - self._answers.keys()
        self._send_question(turn, (worker_id for worker_id in unanswered if worker_id.node == node))

    def _send_question(self, turn: Turn, worker_ids: Iterable[WorkerId]) -> None:
        for worker_id in sorted(worker_ids):
            question = protocol.FindCheckpoints(
                device=worker_id.device, request=self._request, directory=self._directory
            )
            turn.send(worker_id.node, question)

    def forget(self) -> None:
        self._asked, self._answers = frozenset(), {}

    def found(self, worker_id: WorkerId, message: protocol.CheckpointsFound) -> None:
        if message.request == self._request:  # a late answer to an earlier question may lack newer states
            self._answers[worker_id] = message

    def is_asked(self, worker_ids: Collection[WorkerId]) -> bool:
        return self._asked.issuperset(worker_ids)

    def is_answered(self, worker_ids: Collection[WorkerId]) -> bool:
        """Whether all of these were asked, and have answered."""
        # With thousands of workers, each of their answers leads here: most are too few to be compared.
        if len(self._answers) < len(worker_ids):
            return False
        return self._asked.issuperset(worker_ids) and self._answers.keys() >= set(worker_ids)

    def note_broken(self, name: str) -> None:
        """Leave this checkpoint out from now on: one of its layers cannot be used."""
        self._broken.add(name)

    def begin_from(self, name: str) -> None:
        """Note the checkpoint that the run continues from."""
        self._origin = self._origin or name

    def report_problems(self, turn: Turn) -> None:
        """Report what workers cannot use and why, each problem once in a run."""
        problems = {problem for answer in self._answers.values() for problem in answer.problems} - self._reported
        self._reported |= problems
        for problem in sorted(problems):
            turn.note("warning", f"cannot be used: {problem}")

    def complete(self, candidate: Candidate | None) -> tuple[list[KnownCheckpoint], list[str]]:
        """Return the complete checkpoints in the run's own directory, if it begins from `candidate`.

        Those of its past come first, and then the names of other runs' checkpoints, which stay.
        """
        past, found = self._past(candidate), self._own_directory()
        known = [
            KnownCheckpoint(name=each.name, step=each.step, saved_at=each.saved_at, is_final=each.is_final)
            for each in found
            if each.run in past
        ]
        return known, sorted(each.name for each in found if each.run not in past)

    def unfinished(self, candidate: Candidate | None, *, is_private: bool) -> tuple[str, ...]:
        """Return the saves in the run's own directory that were never finished, and never will be."""
        past = self._past(candidate)
        complete = {each.name for each in self._own_directory()}  # It may be complete on another node's disk.
        names = {name for answer in self._answers.values() for name in answer.unfinished} - complete
        # In a directory that is not for this tag alone, other runs may be in the middle of a save.
        return tuple(sorted(name for name in names if is_private or protocol.run_of(name) in past))

    def misfits(self) -> tuple[str, ...]:
        """Return the complete checkpoints of this tag that are another model's, with the reasons."""
        return tuple(sorted({misfit for answer in self._answers.values() for misfit in answer.misfits}))

    def _own_directory(self) -> list[Candidate]:
        return [each for each in self._candidates() if each.is_on_disk and each.directory is None]

    def _past(self, candidate: Candidate | None) -> frozenset[str]:
        """Return this run, and those that it continues from, one after the other."""
        found = {each.run: each for each in reversed(self._candidates())}
        past, run = {self._run}, candidate.run if candidate else None
        # The check ends this loop even if a damaged manifest closes a circle.
        while run is not None and run not in past:
            past.add(run)
            origin = found[run].origin if run in found else None
            run = None if origin is None else protocol.run_of(origin)
        return frozenset(past)

    def newest(self, num_layers: int) -> Candidate | None:
        """Return the newest whole state for a run that begins."""
        # A state in memory or in the run's own directory must not win over the one that the user has named.
        there = [each for each in self._usable(num_layers) if (each.directory is not None) >= bool(self._directory)]
        return there[0] if there else None

    def newest_of_this_run(self, num_layers: int) -> Candidate | None:
        """Return the newest whole state of its own past, for a run that has lost its state."""
        past = self._past_states()
        return next((each for each in self._usable(num_layers) if each.run == self._run or each.name in past), None)

    def _past_states(self) -> frozenset[str]:
        """Return the names of the states that led to this run, from its origin back through the origins of others."""
        candidates = {each.name: each for each in self._candidates()}
        past: set[str] = set()
        origin = self._origin
        while origin in candidates and origin not in past:
            run = candidates[origin].run
            names = [name for name, each in candidates.items() if each.run == run]
            # What a run saved after the state that was continued from took another course.
            past.update(names[: names.index(origin) + 1])
            origin = next((candidates[name].origin for name in names if candidates[name].origin), None)
        return frozenset(past)

    def _usable(self, num_layers: int) -> Sequence[Candidate]:
        newest_first = reversed(self._candidates())
        return [each for each in newest_first if each.name not in self._broken and each.covers(num_layers)]

    def _candidates(self) -> list[Candidate]:
        """Return all states that any worker can read a part of, oldest first."""
        found: dict[str, Candidate] = {}
        for worker_id, answer in sorted(self._answers.items()):
            for state in answer.found:
                candidate = found.get(state.name)
                if candidate is None:
                    candidate = found[state.name] = _candidate(state)
                # Only manifests have `origin` and `is_final`. A state in memory lacks both, and does not undo them.
                candidate.saved_at = max(candidate.saved_at, state.saved_at)
                candidate.is_on_disk |= not state.in_memory
                candidate.origin = candidate.origin or state.origin
                candidate.is_final |= state.is_final
                candidate.directory = candidate.directory or state.directory
                candidate.held[worker_id] = candidate.held.get(worker_id, frozenset()) | frozenset(state.layers)
        age = protocol.ages(found.values())
        return sorted(found.values(), key=lambda each: age[each.name])


def _candidate(state: protocol.FoundState) -> Candidate:
    return Candidate(
        name=state.name,
        run=state.run,
        step=state.step,
        saved_at=state.saved_at,
        directory=state.directory,
        position=state.position,
    )
