"""ReCycle (SOSP 2024): a lost node's data-parallel peers take its microbatches, and no state moves.

Pipelines are equal, and a stage's peers in all pipelines hold the same layers. When a stage has lost k of its D
workers, the D - k others do D / (D - k) times as much. ReCycle splits the backward pass so that this fills the bubbles;
at best a step takes

    max( (m + P - 1) w,  m D / (D - k) w + (P - 1) w / 3 )

for m microbatches a pipeline, P stages of w seconds a microbatch (a third of them forward), and the stage with the most
losses. This model takes that bound as reached. A node that joins takes an empty place at once, and copies its layers
from a peer meanwhile; enough further nodes form another pipeline. When a stage has no worker left, the job restarts
from its newest checkpoint.
"""

from __future__ import annotations

from math import floor

from oobleck.sim.costs import Outcome
from oobleck.sim.sweep import SweepSettings
from oobleck.sim.trace import Trace

from .happenings import MembershipChange, PolicyRun
from .ledger import Ledger
from .throughput import Grids

ABOUT = "ReCycle (SOSP'24): peers of the same stage take over a lost node's microbatches; the step in flight is redone"

_FORWARD_SHARE = 1 / 3


def play(trace: Trace, job: SweepSettings) -> Outcome:
    """Play a trace; a loss that peers take over costs `reroute_s`, another one a restart from a checkpoint."""
    grids = Grids(job)
    run = _Run(trace, job, grids)
    return run.play(policy="recycle", about=ABOUT, throughput=grids, seed=job.seed)


class _Run(PolicyRun):
    def __init__(self, trace: Trace, job: SweepSettings, grids: Grids) -> None:
        ledger = Ledger(batch_size=job.global_batch_size, tokens_per_sample=job.profile.sequence_length)
        super().__init__(trace, ledger, start_s=job.costs.starting_s(len(trace.start)))
        self._grids = grids
        self._reroute_s = job.costs.reroute_s
        self._restart_s = job.costs.restarting_s(trace.most_nodes, job.state_bytes)
        self._checkpoint_every_s = job.interval_s(trace, at_least=2)
        saving_s = job.costs.saving_s(trace.most_nodes, job.state_bytes)
        self._saving_share = saving_s / (self._checkpoint_every_s + saving_s)
        self._saved_s = self._up_s
        self._done = 0.0  # steps since the newest checkpoint
        self._build()

    def _build(self) -> None:
        """Arrange the present nodes as equal pipelines: node i is stage i % depth of its pipeline."""
        depth = self._grids.depth(len(self._here))
        whole_s = self._grids.step_s(len(self._here))
        self._depth = depth or 0
        self._num_pipelines = len(self._here) // depth if depth else 0
        self._whole_s = whole_s
        self._stage_of = {node: index % depth for index, node in enumerate(self._here)} if depth else {}
        self._away: dict[str, int] = {}  # the stages of lost nodes
        # Nodes that make no whole pipeline idle.
        self._used = set(list(self._here)[: self._depth * self._num_pipelines])

    def pace_s(self) -> float | None:
        if self._whole_s is None:
            return None
        lost = [0] * self._depth
        for stage in self._away.values():
            lost[stage] += 1
        peers = self._num_pipelines - max(lost, default=0)
        if peers < 1:
            return None
        m = max(1, self._grids.num_microbatches // self._num_pipelines)
        # Both are in units of w; their ratio scales the time of a step without losses.
        fault_free = m + self._depth - 1
        rerouted = m * self._num_pipelines / peers + (self._depth - 1) * _FORWARD_SHARE
        return self._whole_s * max(1.0, rerouted / fault_free) * self._slowest

    def _train(self, t_s: float, length_s: float, step_s: float) -> None:
        checkpoint_s = self._saving_share * length_s
        steps = (length_s - checkpoint_s) / step_s
        self._done += steps
        if self._checkpoint_every_s > 0 and t_s - self._saved_s >= self._checkpoint_every_s:
            since_s = (t_s - self._saved_s) % self._checkpoint_every_s
            self._saved_s = t_s - since_s
            # Only steps since the newest checkpoint can be lost.
            self._done = min(self._done, since_s / step_s)
        self.ledger.train(t_s, steps=steps, step_s=step_s, checkpoint_s=checkpoint_s)

    def _happen(self, happening: MembershipChange) -> None:
        trained = self.pace_s() is not None
        self._slowest = happening.slowest
        lost = self._used.intersection(happening.lost)
        for node in sorted(lost):
            self._used.discard(node)
            self._away[node] = self._stage_of.pop(node)
        self._fill_places()
        if self.pace_s() is None:
            self._restart(happening, trained=trained)
        elif not self._away and len(self._here) - len(self._used) >= self._depth:
            self._build()  # another pipeline; its nodes copy their layers while the others train
        elif lost:
            self._reroute(happening.t_s, tuple(sorted(lost)), trained=trained)

    def _fill_places(self) -> None:
        idle = [node for node in self._here if node not in self._used]
        for gone, node in zip(list(self._away), idle, strict=False):
            self._stage_of[node] = self._away.pop(gone)
            self._used.add(node)

    def _reroute(self, t_s: float, lost: tuple[str, ...], *, trained: bool) -> None:
        if trained:
            # Peers hold all state, so only the step in flight is made again.
            in_flight = self._done - floor(self._done)
            self._done -= in_flight
            self.ledger.lose(in_flight)
        self._pause(t_s, self._reroute_s)
        self.ledger.recovered(began_s=t_s, nodes=lost, action="reinstantiate", stall_s=self._reroute_s)

    def _restart(self, happening: MembershipChange, *, trained: bool) -> None:
        if trained:
            self.ledger.lose(self._done)
            self._done = 0.0
        self._build()
        if self.pace_s() is not None:
            self._pause(happening.t_s, self._restart_s)
            self._saved_s = self._up_s
            self.ledger.recovered(
                began_s=happening.t_s, nodes=happening.lost, action="checkpoint", stall_s=self._restart_s
            )
