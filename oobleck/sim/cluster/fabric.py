"""The virtual data plane: process groups without tensors, as far as the commit protocol can tell.

It fails deliberately where the real one may: a sent message may be lost with its sender or survive it, and an
all-reduce that all have posted may complete on some members and fail on others.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from oobleck.control.protocol import Subject, WorkerAddress
from oobleck.control.steps import Committee, GroupKey
from oobleck.planner import WorkerId

# Far fewer agreements than these are in progress at a time.
_AGREEMENTS = 64


@dataclass(frozen=True, slots=True)
class Contribution:
    step: int
    numbers: tuple[int, ...]
    # Digests of the summed layers: if they differed, members would train different models.
    versions: tuple[int, ...] = ()


class Violation(AssertionError):
    """A broken promise of the protocol."""


@lru_cache(maxsize=4096)
def label(key: GroupKey) -> str:
    """Return a group's name with all its members, for people."""
    return f"{key.generation}/{key.purpose}/{','.join(map(str, key.members))}"


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of the training thread; a plain preemption point is ready at once."""

    what: str
    ready: Callable[[], bool]
    interrupted: Callable[[], bool] = _never
    can_fail: Callable[[], bool] = _never
    """Whether a peer is lost, so that the environment may end the wait with an error at any time."""
    touches_network: bool = False
    """The environment may end the wait with an error although no worker is lost."""
    takes_s: float = 0.0
    """The seconds of the awaited work once it is ready, where there is a clock."""


class Fabric:
    """Mail between stages and between holders of layers, all-reduces, and agreements.

    Changes notify the workers that they concern, through their call of `watch`.
    """

    def __init__(self) -> None:
        self.newest = 0  # the newest generation of any traffic
        # The newest generation in which an ended worker of a place may have been in a group.
        self._ended: dict[WorkerId, int] = {}
        self._newest_end = 0  # their maximum: most groups are newer
        self._mail: defaultdict[tuple[GroupKey, WorkerId, WorkerId, int], deque[object]] = defaultdict(deque)
        self._reductions: defaultdict[tuple[GroupKey, int], dict[WorkerId, Contribution]] = defaultdict(dict)
        # The newest (sequence, sum) of each group, which all members take.
        self._totals: dict[GroupKey, tuple[int, tuple[int, ...]]] = {}
        # The workers that have posted their part of recent agreements, by generation and subject.
        self._brought: dict[tuple[int, Subject], set[WorkerId]] = {}
        self._islands: dict[str, int] = {}  # nodes that are cut off; equal numbers reach one another
        self._breaks = False  # connections between islands have failed
        self._watchers: dict[WorkerId, Callable[[], None]] = {}
        # The workers that are ready to form a group, until all have formed it.
        self._met: defaultdict[GroupKey, set[WorkerAddress]] = defaultdict(set)
        self._num_formed: Counter[GroupKey] = Counter()
        self._num_addresses = 0

    def address(self, worker_id: WorkerId) -> WorkerAddress:
        """Return a unique address for a process that starts in a place."""
        self._num_addresses += 1
        return WorkerAddress(worker_id=worker_id, host=worker_id.node, port=self._num_addresses)

    def meet(self, key: GroupKey, address: WorkerAddress) -> None:
        """Note that one of a group's members is ready to form it."""
        if address in self._met[key]:
            raise Violation(f"{address.worker_id} forms {label(key)} twice")
        self._met[key].add(address)
        self._note(key, key.members)

    def have_met(self, key: GroupKey, addresses: Iterable[WorkerAddress]) -> bool:
        """Return whether all are ready to form a group, and reach one another."""
        return self._met[key].issuperset(addresses) and self.is_whole(key.members)

    def note_formed(self, key: GroupKey) -> None:
        self._num_formed[key] += 1
        if self._num_formed[key] == len(key.members):
            del self._num_formed[key], self._met[key]

    def watch(self, worker_id: WorkerId, announce: Callable[[], None]) -> None:
        """Call `announce` whenever something changes that the worker of a place may wait for."""
        self._watchers[worker_id] = announce

    def forget(self) -> None:
        """Forget all traffic: the next run counts generations from the beginning."""
        self.newest = 0
        self._ended.clear()
        self._newest_end = 0
        self._mail.clear()
        self._reductions.clear()
        self._met.clear()
        self._num_formed.clear()
        self._totals.clear()
        self._brought.clear()

    def separate(self, nodes: Iterable[str]) -> None:
        """Let these nodes reach one another, and no others."""
        number = 1 + max(self._islands.values(), default=0)
        self._islands.update(dict.fromkeys(nodes, number))

    def heal(self) -> None:
        self._islands.clear()
        self._breaks = False
        self._tell(self._watchers)

    def break_connections(self) -> None:
        """Let cut connections fail, if any still are."""
        if self._islands:
            self._breaks = True
            self._tell(self._watchers)

    def reaches(self, node: str, other: str) -> bool:
        return self._islands.get(node) == self._islands.get(other)

    def is_whole(self, worker_ids: Iterable[WorkerId]) -> bool:
        return not self._islands or len({self._islands.get(worker_id.node, 0) for worker_id in worker_ids}) <= 1

    def lacks_a_member(self, key: GroupKey) -> bool:
        if self._breaks and not self.is_whole(key.members):
            return True
        # Mostly no ended worker can have been in the group, and its members need no look.
        if self._newest_end < key.generation:
            return False
        return any(self.is_gone(member, key.generation) for member in key.members)

    def is_gone(self, worker_id: WorkerId, generation: int) -> bool:
        """Return whether the worker that took part in a generation in this place has ended."""
        return self._ended.get(worker_id, 0) >= generation

    def end(self, worker_id: WorkerId, generation: int) -> None:
        """End the worker of a place; a successor is in groups of newer generations."""
        self._ended[worker_id] = generation
        self._newest_end = max(self._newest_end, generation)
        self._watchers.pop(worker_id, None)
        self._tell(self._watchers)

    def send(self, key: GroupKey, source: WorkerId, target: WorkerId, tag: int, value: object) -> None:
        self._mail[key, source, target, tag].append(value)
        self._note(key, (target,))

    def has_mail(self, key: GroupKey, source: WorkerId, target: WorkerId, tag: int) -> bool:
        # `get` leaves no empty queue in the defaultdict, as it is asked again and again.
        return bool(self._mail.get((key, source, target, tag))) and self.is_whole((source, target))

    def receive(self, key: GroupKey, source: WorkerId, target: WorkerId, tag: int) -> object:
        value = self._mail[key, source, target, tag].popleft()
        if not self._mail[key, source, target, tag]:
            del self._mail[key, source, target, tag]
        return value

    def post(self, key: GroupKey, sequence: int, worker_id: WorkerId, value: Contribution) -> None:
        """Contribute to a group's all-reduce number `sequence`."""
        contributions = self._reductions[key, sequence]
        if worker_id in contributions:
            raise Violation(f"{worker_id} posts all-reduce {sequence} of {label(key)} twice")
        contributions[worker_id] = value
        # A worker that posts a reduction has completed the one two before it, so no worker needs older ones.
        self._reductions.pop((key, sequence - 3), None)
        if len(contributions) == len(key.members):
            self._note(key, key.members)

    def is_complete(self, key: GroupKey, sequence: int) -> bool:
        return len(self._reductions[key, sequence]) == len(key.members) and self.is_whole(key.members)

    def total(self, key: GroupKey, sequence: int, step: int) -> tuple[int, ...]:
        """Return the sorted numbers of all contributions to a complete all-reduce."""
        found = self._reductions[key, sequence]
        # All members take the same total, so only the first computes it.
        if key not in self._totals or self._totals[key][0] != sequence:
            agreed = {(each.step, each.versions) for each in found.values()}
            if len(agreed) > 1 or next(iter(agreed))[0] != step:
                raise Violation(f"{label(key)} mixes steps or versions in step {step}: {found}")
            numbers = tuple(sorted(chain.from_iterable(each.numbers for each in found.values())))
            self._totals[key] = sequence, numbers
        return self._totals[key][1]

    def bring(self, committee: Committee, subject: Subject, worker_id: WorkerId) -> None:
        """Note that a worker posts its part of an agreement; its messages take another path."""
        self._brought.setdefault((committee.generation, subject), set()).add(worker_id)
        if len(self._brought) > _AGREEMENTS:
            # The first key is the oldest.
            del self._brought[next(iter(self._brought))]

    def check_brought(self, committee: Committee, subject: Subject, worker_id: WorkerId) -> None:
        """Check the total that a worker takes. Raises Violation if a member's part is not in it."""
        brought = self._brought[committee.generation, subject]
        if missing := sorted(set(committee.members) - brought):
            raise Violation(f"{worker_id} agrees on {subject} in generation {committee.generation} without {missing}")

    def _note(self, key: GroupKey, concerned: Iterable[WorkerId]) -> None:
        self.newest = max(self.newest, key.generation)
        self._tell(concerned)

    def _tell(self, worker_ids: Iterable[WorkerId]) -> None:
        # Sorted, so that equal runs wake workers in the same order.
        for worker_id in sorted(worker_ids):
            if worker_id in self._watchers:
                self._watchers[worker_id]()
