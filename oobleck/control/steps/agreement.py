"""One worker's part in an agreement of its committee: parts go up the tree (`commit_tree`), the total comes down.

    own part is posted, and all children have sent theirs ──> their sum to the parent
    at the root                                           ──> the total, to the children
    the total comes from the parent                       ──> the same total, to the children

The driver carries the messages, and calls `receive` on whatever thread they arrive. Only the worker's own part waits
for the training thread, so an agreement takes as many hops as the tree is deep, up and down.

What makes it a commit: a worker posts its part of a step after `note_reduced`, the root adds up all parts or none, and
every total is the root's. So a worker with a total knows that all have passed `note_reduced`, and all have equal bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from oobleck.control.protocol import CommitMessage, PartUp, Subject, TotalDown, Totals
from oobleck.planner import WorkerId

from .commit_tree import Neighbours, neighbours_in_tree
from .groups import Committee


@dataclass(frozen=True, slots=True)
class Letter:
    """A message for another worker."""

    target: WorkerId
    message: CommitMessage


@dataclass(slots=True)
class _Round:
    neighbours: Neighbours | None = None
    """None until the worker's own part is posted: the tree follows from the committee."""
    own: Totals | None = None
    parts: dict[WorkerId, Totals] = field(default_factory=dict)
    """The children's parts, each the sum of all parts below it."""
    total: Totals | None = None

    @property
    def missing(self) -> tuple[WorkerId, ...]:
        assert self.neighbours is not None
        return tuple(child for child in self.neighbours.children if child not in self.parts)


class Agreements:
    """This worker's part in agreements. Every method is atomic under `lock`; virtual threads need none."""

    def __init__(self, worker_id: WorkerId, *, lock: AbstractContextManager[object]) -> None:
        self._worker_id = worker_id
        self._lock = lock
        self._generation = 0
        """The newest generation in which this worker has posted."""
        self._rounds: dict[tuple[int, Subject], _Round] = {}
        self._known: tuple[Committee, Neighbours] | None = None

    def neighbours(self, committee: Committee) -> Neighbours:
        # The tree costs O(N), and stays for as long as the committee. Only the training thread asks for it.
        if self._known is None or self._known[0] is not committee:
            self._known = committee, neighbours_in_tree(committee.members, self._worker_id)
        return self._known[1]

    def post(self, committee: Committee, subject: Subject, part: Totals) -> tuple[Letter, ...]:
        """Post this worker's part; returns what to send."""
        neighbours = self.neighbours(committee)
        with self._lock:
            assert committee.generation >= self._generation, (committee.generation, self._generation)
            self._generation = committee.generation
            self._rounds = {key: each for key, each in self._rounds.items() if key[0] >= self._generation}
            known = self._rounds.setdefault((committee.generation, subject), _Round())
            assert known.own is None, f"{self._worker_id} posts {subject} of generation {committee.generation} twice"
            known.neighbours, known.own = neighbours, part
            return self._move(committee.generation, subject, known)

    def receive(self, source: WorkerId, message: CommitMessage) -> tuple[Letter, ...]:
        """Take a message of another worker; returns what to send. Never waits for the training thread."""
        with self._lock:
            # No worker waits for an older generation, because all have answered a fence since. Parts of a newer one are
            # kept until this worker posts its own.
            if message.generation < self._generation:
                return ()
            known = self._rounds.setdefault((message.generation, message.subject), _Round())
            match message:
                case PartUp(part=part):
                    known.parts[source] = part
                    return self._move(message.generation, message.subject, known)
                case TotalDown(total=total):
                    # A fenced worker passes it on, too: that all have reduced is a fact, and any worker that is fenced
                    # refuses the total in `begin_apply`.
                    return self._pass_on(message.generation, message.subject, known, total)

    def take(self, committee: Committee, subject: Subject) -> Totals | None:
        """Return the total if it has arrived, and forget it."""
        key = committee.generation, subject
        with self._lock:
            known = self._rounds.get(key)
            if known is None or known.total is None:
                return None
            del self._rounds[key]
            return known.total

    def is_here(self, committee: Committee, subject: Subject) -> bool:
        """Whether `take` would return something."""
        with self._lock:
            known = self._rounds.get((committee.generation, subject))
            return known is not None and known.total is not None

    def awaited(self, committee: Committee, subject: Subject) -> tuple[WorkerId, ...]:
        """Return the workers whose messages come next: children that have not sent, else the parent."""
        with self._lock:
            known = self._rounds.get((committee.generation, subject))
            if known is None or known.neighbours is None or known.total is not None:
                return ()
            parent = known.neighbours.parent
            return known.missing or (() if parent is None else (parent,))

    def _move(self, generation: int, subject: Subject, known: _Round) -> tuple[Letter, ...]:
        if known.neighbours is None or known.own is None or known.missing:
            return ()
        part = known.own
        for child in known.neighbours.children:  # In a fixed order, so that equal parts have equal sums, to the bit.
            part += known.parts[child]
        parent = known.neighbours.parent
        if parent is None:
            return self._pass_on(generation, subject, known, part)
        return (Letter(parent, PartUp(generation=generation, subject=subject, part=part)),)

    def _pass_on(self, generation: int, subject: Subject, known: _Round, total: Totals) -> tuple[Letter, ...]:
        # A total before the worker's own part belongs to another worker, whose place in the tree this one has taken.
        if known.neighbours is None or known.total is not None:
            return ()
        known.total = total
        message = TotalDown(generation=generation, subject=subject, total=total)
        return tuple(Letter(child, message) for child in known.neighbours.children)
