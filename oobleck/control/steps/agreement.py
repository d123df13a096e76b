"""One worker's part in what all of a committee agree on: parts go up the tree (`commit_tree`), the total comes down.

    own part is posted, and all children have sent theirs ──> their sum to the parent
    at the root                                           ──> the total, to the children
    the total comes from the parent                       ──> the same total, to the children

The driver carries the messages, in whatever time they take; it calls `receive` on whatever thread they arrive. None of
them waits for the training thread but the worker's own part, so a step is agreed on in as many hops as the tree is
deep, there and back.

What makes it a commit: a worker posts its part of a step after `note_reduced`. The root adds up all parts or none, and
every total is the root's. So who has a total knows that all have passed `note_reduced`, and all have the same bits. A
total is passed on before it is looked at, and by a worker that is fenced as well: it says what is so, and any worker
that is fenced refuses it in `begin_apply`.

What belongs to a generation before the newest in which this worker has posted is dropped: nobody waits for it, since
all have answered a fence since. Parts of a newer one are kept until this worker posts its own.
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
    """What is known of one agreement."""

    neighbours: Neighbours | None = None
    """Once the own part is posted: the tree follows from the committee."""
    own: Totals | None = None
    parts: dict[WorkerId, Totals] = field(default_factory=dict)
    """Of the children, each with all below it."""
    total: Totals | None = None

    @property
    def missing(self) -> tuple[WorkerId, ...]:
        """The children that have not sent their parts."""
        assert self.neighbours is not None
        return tuple(child for child in self.neighbours.children if child not in self.parts)


class Agreements:
    """Every method is atomic under `lock`: real threads bring a real one, virtual ones need none."""

    def __init__(self, worker_id: WorkerId, *, lock: AbstractContextManager[object]) -> None:
        self._worker_id = worker_id
        self._lock = lock
        self._generation = 0
        """The newest in which this worker has posted."""
        self._rounds: dict[tuple[int, Subject], _Round] = {}
        self._known: tuple[Committee, Neighbours] | None = None

    def neighbours(self, committee: Committee) -> Neighbours:
        """Return whom this worker tells, and who tells it, in a committee."""
        if self._known is None or self._known[0] is not committee:
            self._known = committee, neighbours_in_tree(committee.members, self._worker_id)
        return self._known[1]

    def post(self, committee: Committee, subject: Subject, part: Totals) -> tuple[Letter, ...]:
        """Bring this worker's part; returns what is to be sent."""
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
        """Take a message of another worker; returns what is to be sent. Never waits for the training thread."""
        with self._lock:
            if message.generation < self._generation:
                return ()
            known = self._rounds.setdefault((message.generation, message.subject), _Round())
            match message:
                case PartUp(part=part):
                    known.parts[source] = part
                    return self._move(message.generation, message.subject, known)
                case TotalDown(total=total):
                    return self._pass_on(message.generation, message.subject, known, total)

    def take(self, committee: Committee, subject: Subject) -> Totals | None:
        """Take what all have brought, if it is here: it is forgotten then."""
        key = committee.generation, subject
        with self._lock:
            known = self._rounds.get(key)
            if known is None or known.total is None:
                return None
            del self._rounds[key]
            return known.total

    def is_here(self, committee: Committee, subject: Subject) -> bool:
        """Return whether `take` would return something."""
        with self._lock:
            known = self._rounds.get((committee.generation, subject))
            return known is not None and known.total is not None

    def awaited(self, committee: Committee, subject: Subject) -> tuple[WorkerId, ...]:
        """The workers that have to send something next: children that have not, else the parent."""
        with self._lock:
            known = self._rounds.get((committee.generation, subject))
            if known is None or known.neighbours is None or known.total is not None:
                return ()
            parent = known.neighbours.parent
            return known.missing or (() if parent is None else (parent,))

    def _move(self, generation: int, subject: Subject, known: _Round) -> tuple[Letter, ...]:
        """Tell the parent once all parts are here; at the root, that is the total."""
        if known.neighbours is None or known.own is None or known.missing:
            return ()
        part = known.own
        for child in known.neighbours.children:  # in one order: sums of the same parts are the same bits
            part += known.parts[child]
        parent = known.neighbours.parent
        if parent is None:
            return self._pass_on(generation, subject, known, part)
        return (Letter(parent, PartUp(generation=generation, subject=subject, part=part)),)

    def _pass_on(self, generation: int, subject: Subject, known: _Round, total: Totals) -> tuple[Letter, ...]:
        """The total is here: tell the children. One that comes before the own part is another worker's, of a place
        that this one has taken."""
        if known.neighbours is None or known.total is not None:
            return ()
        known.total = total
        message = TotalDown(generation=generation, subject=subject, total=total)
        return tuple(Letter(child, message) for child in known.neighbours.children)
