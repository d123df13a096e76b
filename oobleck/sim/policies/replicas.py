"""Systems whose unit of recovery is a data-parallel replica: a whole pipeline is dropped when it loses a node.

| | torchft | ReCoVer |
|---|---|---|
| the step in flight | discarded by all, and its samples with it | finished by the survivors |
| the batch of fewer replicas | smaller, so that steps take as long | constant, so that steps take longer |
| a dropped replica | restarts when it has enough nodes, and copies a peer's state | never comes back |

Nodes of dropped replicas idle until enough of them form a replica. When no replica is left, the job restarts from its
newest checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Protocol

from oobleck.sim.costs import Outcome
from oobleck.sim.sweep import SweepSettings
from oobleck.sim.trace import Trace

from .happenings import MembershipChange, PolicyRun
from .ledger import Ledger
from .throughput import Throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRules:
    name: str
    about: str
    loss_s: float
    """The pause after a loss, after the step that is discarded or inside the one that is finished."""
    discards: bool = False
    """Whether the step in flight is discarded."""
    has_constant_batch: bool = False
    rejoin_s: float | None = None
    """From enough nodes for a replica until it trains; None: only a restart of the job brings it back."""
    fewest_share: float = 0.0
    """The share of all replicas below which the job saves its state and restarts with all nodes."""


class Pipelines(Throughput, Protocol):
    """Equal pipelines; `Grids` has them by plans."""

    @property
    def num_microbatches(self) -> int:
        """The microbatches of a step, over all pipelines."""

    def depth(self, num_nodes: int) -> int | None:
        """Return the nodes of each pipeline; None for too few nodes."""

    def pipelines_s(self, depth: int, num_pipelines: int, num_microbatches: int) -> float:
        """Return the seconds of a step of a number of pipelines, each with a number of microbatches."""


def play(trace: Trace, job: SweepSettings, rules: ReplicaRules, pipelines: Pipelines) -> Outcome:
    """Play a trace; O(events · nodes)."""
    run = _Run(trace, job, rules, pipelines)
    return run.play(policy=rules.name, about=rules.about, throughput=pipelines, seed=job.seed)


class _Run(PolicyRun):
    def __init__(self, trace: Trace, job: SweepSettings, rules: ReplicaRules, pipelines: Pipelines) -> None:
        ledger = Ledger(batch_size=job.global_batch_size, tokens_per_sample=job.profile.sequence_length)
        super().__init__(trace, ledger, start_s=job.costs.starting_s(len(trace.start)))
        self._rules, self._pipelines = rules, pipelines
        most = max(count for _, count in trace.counts)
        self._depth = pipelines.depth(most) or 0
        self._most = min(most // self._depth, pipelines.num_microbatches) if self._depth else 0
        self._restart_s = job.costs.restarting_s(most, job.state_bytes)
        self._saving_s = job.costs.saving_s(most, job.state_bytes)
        self._checkpoint_every_s = job.interval_s(trace, at_least=2)
        self._saved_s = self._up_s
        self._replicas: list[tuple[str, ...]] = []
        self._rejoining: list[tuple[float, tuple[str, ...]]] = []  # when they train again, the earliest first
        self._attempts = 0.0  # steps, discarded ones included; its fraction is the done share of that in flight
        self._done = 0.0  # steps since the newest checkpoint
        self._build()

    def _build(self) -> None:
        nodes, depth = list(self._here), self._depth
        number = min(len(nodes) // depth, self._most) if depth else 0
        self._replicas = [tuple(nodes[index * depth : (index + 1) * depth]) for index in range(number)]
        self._rejoining.clear()
        self._attempts = 0.0

    def pace_s(self) -> float | None:
        number = len(self._replicas)
        if not number:
            return None
        sharing = number if self._rules.has_constant_batch else self._most
        each = -(-self._pipelines.num_microbatches // sharing)
        return self._pipelines.pipelines_s(self._depth, number, each) * self._slowest

    @property
    def _batch_share(self) -> float:
        return 1.0 if self._rules.has_constant_batch else len(self._replicas) / self._most

    def _move_to(self, t_s: float) -> None:
        while self._rejoining and self._rejoining[0][0] <= t_s:
            ready_s, nodes = self._rejoining.pop(0)
            super()._move_to(ready_s)
            self._replicas.append(nodes)
        super()._move_to(t_s)

    def _train(self, t_s: float, length_s: float, step_s: float) -> None:
        checkpoint_s = length_s * self._saving_s / (self._checkpoint_every_s + self._saving_s)
        attempts = (length_s - checkpoint_s) / step_s
        self._attempts += attempts
        self._done += attempts * self._batch_share
        if t_s - self._saved_s >= self._checkpoint_every_s:
            since_s = (t_s - self._saved_s) % self._checkpoint_every_s
            self._saved_s = t_s - since_s
            self._done = min(self._done, since_s / step_s * self._batch_share)
        steps, mean_s = attempts * self._batch_share, step_s / self._batch_share
        self.ledger.train(t_s, steps=steps, step_s=mean_s, checkpoint_s=checkpoint_s)

    def _happen(self, happening: MembershipChange) -> None:
        lost, step_s = set(happening.lost), self.pace_s()
        broken = [replica for replica in self._replicas if not lost.isdisjoint(replica)]
        share = self._batch_share if self._most else 0.0
        self._slowest = happening.slowest
        self._replicas = [replica for replica in self._replicas if replica not in broken]
        self._rejoining = [each for each in self._rejoining if lost.isdisjoint(each[1])]
        if broken and step_s is not None and self._replicas:
            self._lose(happening, step_s, share)
        if not self._replicas or len(self._replicas) < self._rules.fewest_share * self._most:
            self._restart(happening, trained=step_s is not None)
        elif self._rules.rejoin_s is not None:
            self._form(happening.t_s + self._rules.rejoin_s)

    def _lose(self, happening: MembershipChange, step_s: float, share: float) -> None:
        """Let the survivors discard the step in flight, or finish it."""
        t_s, pause_s = happening.t_s, self._rules.loss_s
        done = self._attempts - floor(self._attempts)
        if t_s < self._up_s:  # there is no step in flight yet
            pause_s = max(pause_s, self._up_s - t_s)
        elif self._rules.discards:
            # Gradients of all are thrown away at the end of the step, where the loss shows.
            self.ledger.lose(done * share)
            self.ledger.steps_lost += 1 - done * share
            self._done = max(0.0, self._done - done * share)
            self._attempts -= done
            pause_s += (1 - done) * step_s
        else:
            # The dropped replica's part is computed again.
            pause_s += done * max(0.0, (self.pace_s() or step_s) - step_s)
        self._pause(t_s, pause_s)
        self.ledger.recovered(began_s=t_s, nodes=happening.lost, action="reinstantiate", stall_s=pause_s)

    def _form(self, ready_s: float) -> None:
        """Let idle nodes form replicas."""
        busy = {node for nodes in (*self._replicas, *(each for _, each in self._rejoining)) for node in nodes}
        idle = [node for node in self._here if node not in busy]
        while len(idle) >= self._depth and len(self._replicas) + len(self._rejoining) < self._most:
            self._rejoining.append((ready_s, tuple(idle[: self._depth])))
            del idle[: self._depth]

    def _restart(self, happening: MembershipChange, *, trained: bool) -> None:
        before, pause_s = len(self._replicas), self._restart_s
        if not self._replicas and trained:
            self.ledger.lose(self._done)
            self._done = 0.0
        elif self._replicas:
            if len(self._here) // self._depth <= before:  # a restart would bring nothing back
                return
            pause_s += self._saving_s
        self._build()
        if self._replicas:
            self._pause(happening.t_s, pause_s)
            self._saved_s = self._up_s
            self.ledger.recovered(began_s=happening.t_s, nodes=happening.lost, action="checkpoint", stall_s=pause_s)
