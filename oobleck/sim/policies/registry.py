"""The policies by name. Their constants, with sources, are in `oobleck.sim.costs.Costs`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from oobleck.errors import ConfigError
from oobleck.sim.costs import Outcome, daly_interval_s, mean_time_to_loss_s, outcome_of_journal
from oobleck.sim.sweep import SweepSettings, sweep
from oobleck.sim.trace import Trace

from . import learners, recycle, replicas
from .stop_and_go import Rules, adjacent_in_grid, play
from .throughput import Grids, Plans, RedundantGrids, Throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    job: SweepSettings
    report: Callable[[float], None] = lambda _: None
    """Receives the simulated seconds as progress."""


def _oobleck(trace: Trace, settings: PolicySettings) -> Outcome:
    journal = sweep(trace, settings.job, report=settings.report)
    return outcome_of_journal(
        journal, policy="oobleck", about="Oobleck: the real coordinator and planner; no committed step is lost"
    )


def _rules(
    trace: Trace, job: SweepSettings, name: str, about: str, throughput: Throughput, *, at_least: int = 1
) -> Rules:
    """Return the rules of a system that restarts from a checkpoint when `at_least` nodes are lost at once."""
    costs, num_nodes, state_bytes = job.costs, trace.most_nodes, job.state_bytes
    return Rules(
        name=name,
        about=about,
        throughput=throughput,
        batch_size=job.global_batch_size,
        tokens_per_sample=job.profile.sequence_length,
        start_s=costs.starting_s(len(trace.start)),
        pause_s=costs.restarting_s(num_nodes, state_bytes),
        checkpoint_every_s=job.interval_s(trace, at_least=at_least),
        checkpoint_s=costs.saving_s(num_nodes, state_bytes),
        joins_at_once=True,
        join_pause_s=costs.saving_s(num_nodes, state_bytes) + costs.restarting_s(num_nodes, state_bytes),
        join_horizon_s=mean_time_to_loss_s(trace),
    )


def _restart(trace: Trace, settings: PolicySettings) -> Outcome:
    job = settings.job
    about = "Checkpoint and restart: all stop at a loss and continue from the newest checkpoint with those left"
    return play(trace, _rules(trace, job, "restart", about, Plans(job)), seed=job.seed)


def _varuna(trace: Trace, settings: PolicySettings) -> Outcome:
    job = settings.job
    about = "Varuna (EuroSys'22): a grid of equal pipelines is chosen again at each loss, from the newest checkpoint"
    return play(trace, _rules(trace, job, "varuna", about, Grids(job)), seed=job.seed)


def _bamboo(trace: Trace, settings: PolicySettings) -> Outcome:
    job = settings.job
    depth = RedundantGrids(job).depth(len(trace.start))
    about = "Bamboo (NSDI'23): every node computes its neighbour's layers too, and takes over when that is lost"
    rules = _rules(trace, job, "bamboo", about, RedundantGrids(job, depth=depth), at_least=2)
    rules = replace(
        rules,
        pause_s=job.costs.failover_s,
        rolls_back=adjacent_in_grid(depth or 1),
        rollback_pause_s=rules.pause_s,
        join_pause_s=job.costs.failover_s,
    )
    return play(trace, rules, seed=job.seed)


def _recycle(trace: Trace, settings: PolicySettings) -> Outcome:
    return recycle.play(trace, settings.job)


def _checkpointless(trace: Trace, settings: PolicySettings) -> Outcome:
    job, grids = settings.job, Grids(settings.job)
    about = "HyperPod's checkpointless training: all processes restart in place, and peers hold the state"
    rules = _rules(trace, job, "checkpointless", about, grids, at_least=2)
    rules = replace(
        rules,
        pause_s=job.costs.in_process_s,
        rolls_back=_loses_all_copies(grids),
        rollback_pause_s=rules.pause_s,
        join_pause_s=job.costs.in_process_s,
    )
    return play(trace, rules, seed=job.seed)


def _hotswap(trace: Trace, settings: PolicySettings) -> Outcome:
    job, grids = settings.job, Grids(settings.job)
    about = "Hot swap (TrainMover OSDI'26, DeadPool): a spare takes a lost node's place; without one, as `restart`"
    rules = _rules(trace, job, "hotswap", about, grids)
    rules = replace(rules, spares=int(job.costs.swap_spares), swap_s=job.costs.swap_s)
    if job.checkpoint_interval_s is None:
        # Only losses without a spare go back to a checkpoint, and which those are depends on no checkpoint.
        recoveries = play(trace, replace(rules, checkpoint_every_s=inf), seed=job.seed).summary.recoveries
        number = sum(recovery.action == "checkpoint" for recovery in recoveries)
        every_s = daly_interval_s(rules.checkpoint_s, trace.duration_s / number) if number else inf
        rules = replace(rules, checkpoint_every_s=every_s)
    return play(trace, rules, seed=job.seed)


def _loses_all_copies(grids: Grids) -> Callable[[Collection[str], Sequence[str]], bool]:
    """Return a rule that is true when a stage's nodes are lost in all pipelines of a grid."""

    def are_all_lost(lost: Collection[str], used: Sequence[str]) -> bool:
        depth = grids.depth(len(used)) or 1
        trained = used[: len(used) // depth * depth]
        return any(all(node in lost for node in trained[stage::depth]) for stage in range(depth))

    return are_all_lost


def _torchft(trace: Trace, settings: PolicySettings) -> Outcome:
    job, costs = settings.job, settings.job.costs
    rules = replicas.ReplicaRules(
        name="torchft",
        about="torchft: a step that meets a loss is discarded, and its replica trains again when it is whole",
        loss_s=costs.discard_s,
        discards=True,
        rejoin_s=costs.rejoin_s,
    )
    return replicas.play(trace, job, rules, Grids(job))


def _recover(trace: Trace, settings: PolicySettings) -> Outcome:
    job, costs = settings.job, settings.job.costs
    if costs.fewest_replicas > 1:
        raise ConfigError(f"fewest_replicas is {costs.fewest_replicas}; it is a share, of at most 1")
    rules = replicas.ReplicaRules(
        name="recover",
        about="ReCoVer (2026): survivors finish the step with a constant batch; a replica that lost a node is dropped",
        loss_s=costs.repair_s,
        has_constant_batch=True,
        fewest_share=costs.fewest_replicas,
    )
    return replicas.play(trace, job, rules, Grids(job))


def _decoupled_diloco(trace: Trace, settings: PolicySettings) -> Outcome:
    return learners.play(trace, settings.job)


POLICIES: Mapping[str, Callable[[Trace, PolicySettings], Outcome]] = {
    "oobleck": _oobleck,
    "restart": _restart,
    "varuna": _varuna,
    "bamboo": _bamboo,
    "recycle": _recycle,
    "torchft": _torchft,
    "recover": _recover,
    "checkpointless": _checkpointless,
    "hotswap": _hotswap,
    "decoupled-diloco": _decoupled_diloco,
}
