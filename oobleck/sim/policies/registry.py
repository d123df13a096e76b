"""The policies by name, with their constants and sources.

| constant | value | source |
|---|---|---|
| start of a new process, from a lost node to training again (restart) | 60 s | a warm standby takes about 1 min |
| Varuna: restart | 30 s + state / 0.16 GB/s | fits what the SOSP'23 artifact measured for five models (76 to 701 s) |
| Varuna: checkpoint, training waits | 10 s + state / 1 GB/s | the same (11 to 120 s) |
| Bamboo: failover to the node that holds a copy | 30 s | the SOSP'23 artifact |
| Bamboo: rebuilding pipelines from a checkpoint | as Varuna's restart | the SOSP'23 artifact (76 to 450 s) |
| ReCycle: rerouting | 1 s | a new plan is looked up, not computed |

The state is that of the profile's parameters and optimizer, at most 16 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from oobleck.sim.costs import Outcome, outcome_of_journal
from oobleck.sim.sweep import SweepSettings, sweep
from oobleck.sim.trace import Trace

from . import recycle
from .stop_and_go import Rules, adjacent_in_grid, play
from .throughput import Grids, Plans, Throughput, redundant_profile

_PROCESS_START_S = 60.0
_RESTART_FIXED_S, _RESTART_BYTES_PER_S = 30.0, 0.16e9
_CHECKPOINT_FIXED_S, _CHECKPOINT_BYTES_PER_S = 10.0, 1e9
_FAILOVER_S = 30.0
_REROUTE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    job: SweepSettings
    report: Callable[[float], None] = lambda _: None
    """Receives the simulated seconds as progress."""

    @property
    def state_bytes(self) -> int:
        return sum(layer.state_bytes for layer in self.job.profile.layers)

    @property
    def restart_s(self) -> float:
        return _RESTART_FIXED_S + self.state_bytes / _RESTART_BYTES_PER_S


def _oobleck(trace: Trace, settings: PolicySettings) -> Outcome:
    journal = sweep(trace, settings.job, report=settings.report)
    return outcome_of_journal(
        journal, policy="oobleck", about="Oobleck: the real coordinator and planner; no committed step is lost"
    )


def _rules(job: SweepSettings, name: str, about: str, throughput: Throughput, pause_s: float) -> Rules:
    return Rules(
        name=name,
        about=about,
        throughput=throughput,
        batch_size=job.global_batch_size,
        tokens_per_sample=job.profile.sequence_length,
        start_s=job.costs.node_start_s,
        pause_s=pause_s,
        checkpoint_every_s=job.checkpoint_interval_s,
    )


def _restart(trace: Trace, settings: PolicySettings) -> Outcome:
    job = settings.job
    about = "Checkpoint and restart: all stop at a loss and continue from the newest checkpoint with those left"
    rules = _rules(job, "restart", about, Plans(job), _PROCESS_START_S + job.costs.checkpoint_read_s)
    return play(trace, rules, seed=job.seed)


def _varuna(trace: Trace, settings: PolicySettings) -> Outcome:
    job = settings.job
    about = "Varuna (EuroSys'22): a grid of equal pipelines is chosen again at each loss, from the newest checkpoint"
    rules = replace(
        _rules(job, "varuna", about, Grids(job), settings.restart_s),
        checkpoint_s=_CHECKPOINT_FIXED_S + settings.state_bytes / _CHECKPOINT_BYTES_PER_S,
    )
    return play(trace, rules, seed=job.seed)


def _bamboo(trace: Trace, settings: PolicySettings) -> Outcome:
    job = settings.job
    profile = redundant_profile(job.profile)
    depth = Grids(job, profile=profile).depth(len(trace.start))
    about = "Bamboo (NSDI'23): every node computes its neighbour's layers too, and takes over when that is lost"
    rules = replace(
        _rules(job, "bamboo", about, Grids(job, profile=profile, depth=depth), _FAILOVER_S),
        rolls_back=adjacent_in_grid(depth or 1),
        rollback_pause_s=settings.restart_s,
        joins_at_once=True,
        join_pause_s=_FAILOVER_S,
    )
    return play(trace, rules, seed=job.seed)


def _recycle(trace: Trace, settings: PolicySettings) -> Outcome:
    job = settings.job
    return recycle.play(trace, job, reroute_s=_REROUTE_S, restart_s=_PROCESS_START_S + job.costs.checkpoint_read_s)


POLICIES: Mapping[str, Callable[[Trace, PolicySettings], Outcome]] = {
    "oobleck": _oobleck,
    "restart": _restart,
    "varuna": _varuna,
    "bamboo": _bamboo,
    "recycle": _recycle,
}
