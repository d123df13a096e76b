"""Decoupled DiLoCo (2026): independent learners whose parameters a syncer merges, so that a loss stops only one.

Each learner has an equal part of the nodes and of the batch, trains on the best plan of its present nodes, and pauses
for each change among them. The syncer's least quorum is one learner, as in the paper, so the others never wait. This
model takes exchanges of parameters as hidden, and samples that are learned apart as worth as much as others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from oobleck.errors import ConfigError
from oobleck.sim.costs import Outcome
from oobleck.sim.sweep import SweepSettings
from oobleck.sim.trace import Trace, of_nodes

from .ledger import merged
from .stop_and_go import Rules, run
from .throughput import Plans, Throughput

_NAME = "decoupled-diloco"


def play(trace: Trace, job: SweepSettings) -> Outcome:
    """Play a trace. Raises ConfigError for no learner."""

    def plans(number: int) -> Throughput:
        own = -(-job.num_microbatches // number) * job.profile.microbatch_size
        return Plans(replace(job, global_batch_size=own))

    return play_learners(trace, job, plans)


def play_learners(trace: Trace, job: SweepSettings, throughput_of: Callable[[int], Throughput]) -> Outcome:
    """Play a trace with at most `num_learners`; `throughput_of` takes their number, and returns the speed of each."""
    number, most = int(job.costs.num_learners), max(count for _, count in trace.counts)
    if number < 1:
        raise ConfigError(f"num_learners is {number}; it must be at least 1")
    number = max(1, min(number, job.num_microbatches, most))
    # A learner holds the model by itself.
    while number > 1 and throughput_of(number).step_s(most // number) is None:
        number -= 1
    throughput = throughput_of(number)
    about = f"Decoupled DiLoCo (2026): a loss stops one of {number} learners, whose parameters a syncer merges"
    rules = Rules(
        name=_NAME,
        about=about,
        throughput=throughput,
        batch_size=job.global_batch_size,
        start_s=job.costs.starting_s(len(trace.start)),
        pause_s=job.costs.learner_pause_s,
        rolls_back=None,
        joins_at_once=True,
        join_pause_s=job.costs.learner_pause_s,
    )
    parts = [of_nodes(trace, trace.nodes[index::number]) for index in range(number)]
    ledger = merged(
        [run(part, rules) for part in parts],
        batch_size=job.global_batch_size,
        tokens_per_sample=job.profile.sequence_length,
    )
    best_s = throughput.step_s(most // number)
    max_steps = int(trace.duration_s / best_s) if best_s else 0
    return ledger.outcome(policy=_NAME, about=about, seed=job.seed, max_steps=max_steps)
