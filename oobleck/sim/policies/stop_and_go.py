"""Systems that stop at a loss and continue after a pause.

They differ in their throughput, the pause, and the lost work: the step in flight, or everything since the newest
checkpoint. The model follows training in fractions of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor, inf

from oobleck.sim.costs import Outcome
from oobleck.sim.trace import Trace

from .happenings import MembershipChange, PolicyRun
from .ledger import Ledger
from .throughput import Throughput

_NEARLY = 1e-9


def _always(_lost: Collection[str], _used: Sequence[str]) -> bool:
    return True


def adjacent_in_grid(depth: int) -> Callable[[Collection[str], Sequence[str]], bool]:
    """Return a rule that is true for two lost neighbours of one pipeline, each of `depth` nodes in turn."""

    def are_adjacent(lost: Collection[str], used: Sequence[str]) -> bool:
        places = [index for index, node in enumerate(used) if node in lost]
        return any(b - a == 1 and a // depth == b // depth for a, b in pairwise(places))

    return are_adjacent


@dataclass(frozen=True, kw_only=True)
class Rules:
    name: str
    about: str
    throughput: Throughput
    batch_size: int
    tokens_per_sample: int = 1
    start_s: float = 0.0
    pause_s: float
    """From a loss until training continues; another loss within the pause restarts it."""
    rolls_back: Callable[[Collection[str], Sequence[str]], bool] | None = _always
    """Whether a loss costs all steps since the newest checkpoint, given the lost and all used nodes; None for never."""
    rollback_pause_s: float | None = None
    """The pause after a rollback; None for `pause_s`."""
    lost_share: Callable[[float], float] = lambda done: done
    """The lost share of the step in flight, given its done share, without a rollback."""
    checkpoint_every_s: float = inf
    checkpoint_every_steps: int | None = None
    """Replaces `checkpoint_every_s`."""
    checkpoint_s: float = 0.0
    """The pause of training for each checkpoint."""
    joins_at_once: bool = False
    """By default, nodes that join take part after the next loss."""
    join_pause_s: float = 0.0
    join_horizon_s: float = inf
    """Nodes that join take part at once if the steps become faster by more than the pause within this time."""
    max_nodes: int | None = None
    spares: int = 0
    """The most nodes that stand by; fewer where the others would not hold the model."""
    swap_s: float | None = None
    """The pause if idle nodes take the places of all that are lost, in which no step but that in flight is lost."""


def play(trace: Trace, rules: Rules, *, seed: int = 0) -> Outcome:
    """Play a trace; O(events · nodes that change)."""
    return _Run(trace, rules).play(policy=rules.name, about=rules.about, throughput=rules.throughput, seed=seed)


def run(trace: Trace, rules: Rules) -> Ledger:
    """Play a trace, and return its accounts alone."""
    played = _Run(trace, rules)
    played.play_through()
    return played.ledger


class _Run(PolicyRun):
    def __init__(self, trace: Trace, rules: Rules) -> None:
        ledger = Ledger(batch_size=rules.batch_size, tokens_per_sample=rules.tokens_per_sample)
        super().__init__(trace, ledger, start_s=rules.start_s)
        self._rules = rules
        self._pos_s = 0.0  # since the newest checkpoint
        self._use()

    def _use(self) -> None:
        self._used = tuple(self._here)[: self._num_used()]
        self._set_pace()

    def _num_used(self) -> int:
        """Return how many of the present nodes train, or wait for enough others."""
        throughput = self._rules.throughput
        number = min(len(self._here), self._rules.max_nodes or len(self._here))
        least = max(0, number - self._rules.spares)
        trained = next((some for some in range(least, number) if throughput.step_s(some) is not None), number)
        return throughput.num_used(trained)

    def _set_pace(self) -> None:
        usual_s = self._rules.throughput.step_s(len(self._used))
        self._step_s = usual_s * self._slowest if usual_s is not None else None
        if self._rules.checkpoint_every_steps is not None:
            self._steps_each: float = self._rules.checkpoint_every_steps
        else:
            # There is at least a step between two checkpoints.
            self._steps_each = max(1.0, self._rules.checkpoint_every_s / self._step_s) if self._step_s else inf

    def pace_s(self) -> float | None:
        return self._step_s

    def _train(self, t_s: float, length_s: float, step_s: float) -> None:
        before = self._done()
        cycles, self._pos_s = self._split(self._pos_s + length_s)
        made = cycles * (self._steps_each if cycles else 0.0) + self._done() - before
        checkpoint_s = max(0.0, length_s - made * step_s)
        self.ledger.train(t_s, steps=made, step_s=step_s, checkpoint_s=checkpoint_s)

    def _split(self, pos_s: float) -> tuple[int, float]:
        if self._steps_each == inf or self._step_s is None:
            return 0, pos_s
        cycle_s = self._steps_each * self._step_s + self._rules.checkpoint_s
        return int(pos_s // cycle_s), pos_s % cycle_s

    def _done(self) -> float:
        return 0.0 if self._step_s is None else min(self._pos_s / self._step_s, self._steps_each)

    def _continue_after(self, done: float) -> None:
        self._pos_s = 0.0 if self._step_s is None else done * self._step_s

    def _happen(self, happening: MembershipChange) -> None:
        lost = set(happening.lost).intersection(self._used)
        if happening.slowest != self._slowest:
            # The position is in seconds of the old pace, so it is carried over in steps.
            done, self._slowest = self._done(), happening.slowest
            self._set_pace()
            self._continue_after(done)
        if lost:
            self._fail(happening.t_s, lost)
        elif happening.joined and (self._step_s is None or self._pays_to_join(self._step_s)):
            self._join(happening)

    def _pays_to_join(self, step_s: float) -> bool:
        faster_s = self._rules.throughput.step_s(self._num_used()) if self._rules.joins_at_once else None
        if faster_s is None:
            return False
        gain = 1 - faster_s * self._slowest / step_s
        return gain > _NEARLY and gain * self._rules.join_horizon_s > self._rules.join_pause_s

    def _fail(self, t_s: float, lost: set[str]) -> None:
        rules = self._rules
        idle = [node for node in self._here if node not in self._used]
        is_swap = rules.swap_s is not None and len(idle) >= len(lost)
        rolls_back = not is_swap and rules.rolls_back is not None and rules.rolls_back(lost, self._used)
        if self._step_s is not None:
            done = self._done()
            forgotten = done if rolls_back else rules.lost_share(done - floor(done))
            self.ledger.lose(forgotten)
            self._pos_s = 0.0 if rolls_back else (done - forgotten) * self._step_s
        pause_s = rules.pause_s
        if rolls_back and rules.rollback_pause_s is not None:
            pause_s = rules.rollback_pause_s
        if is_swap and rules.swap_s is not None:
            pause_s = rules.swap_s
            places = dict(zip(sorted(lost), idle, strict=False))
            self._used = tuple(places.get(node, node) for node in self._used)
            self._pause(t_s, pause_s)
        else:
            self._begin(t_s, pause_s)
        action = "checkpoint" if rolls_back else "reinstantiate"
        self.ledger.recovered(began_s=t_s, nodes=tuple(sorted(lost)), action=action, stall_s=pause_s)

    def _join(self, happening: MembershipChange) -> None:
        t_s, pause_s = happening.t_s, self._rules.join_pause_s if self._step_s is not None else self._rules.pause_s
        self._begin(t_s, pause_s)
        self.ledger.recovered(began_s=t_s, nodes=happening.joined, action="absorb", stall_s=pause_s, cause="joined")

    def _begin(self, t_s: float, pause_s: float) -> None:
        self._pause(t_s, pause_s)
        done = self._done()
        self._use()
        self._continue_after(done)
