"""What it costs to commit what a step has done: the same job with one reduction a step and with several, in turns.

    python tools/bench/sections.py --rounds 3

Two pipelines of one worker each train the same model on the same samples, each turn in fresh processes. The step time
of a turn is the median of its steps, warm-up left out; the ratio is the median of the ratios within a round, so that a
machine that slows down for a while slows both. All turns have to come to the same losses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Threads that wait should sleep: where a core is wanted by others too, spinning costs many times the work itself.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours, and those of processes

from oobleck.job import DataSpec, JobSpec, ModelSpec
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, StageTemplate
from oobleck.schedule import ScheduleKind
from tools.bench.local_workers import LocalWorkers, fork_context
from tools.smoke import parse_arguments

__all__ = ["main"]

_NODES = ("node0", "node1")
_WARM_UP = 1
_LOSS_TOLERANCE = 1e-3
"""Float32 sums in different orders, through some steps of training."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="in each turn")
    parser.add_argument("--sections", type=int, default=4, help="of a step, against one")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens in a sample")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--microbatch-size", type=int, default=4)
    chosen = parse_arguments(parser, arguments, rounds=1, steps=3, hidden=64, blocks=2, length=16, microbatches=8)
    job, plan = _job(chosen), _plan(chosen.blocks, chosen.microbatches)
    turns: dict[int, list[tuple[float, tuple[float, ...]]]] = {1: [], chosen.sections: []}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(chosen.rounds):
            for num_sections in sorted(turns, reverse=bool(number % 2)):
                turn = _turn(job, plan, num_sections, Path(directory) / "cache")
                turns[num_sections].append(turn)
                print(f"round {number + 1}, {num_sections} sections: step {turn[0]:.3f} s", flush=True)
    expected = turns[1][0][1]
    for num_sections, measured in turns.items():
        gap = max(abs(one - other) for _, losses in measured for one, other in zip(losses, expected, strict=True))
        if gap > _LOSS_TOLERANCE:
            raise RuntimeError(f"{num_sections} sections came to other losses than one: {gap:.2e} apart")
        each = " ".join(f"{step_s:.3f}" for step_s, _ in measured)
        print(f"{num_sections} sections: step {statistics.median(step_s for step_s, _ in measured):.4f} s ({each})")
    ratios = [one / several for (one, _), (several, _) in zip(turns[1], turns[chosen.sections], strict=True)]
    print(f"throughput of {chosen.sections} sections, of one's: {statistics.median(ratios):.3f}")


def _turn(job: JobSpec, plan: ExecutionPlan, num_sections: int, cache_dir: Path) -> tuple[float, tuple[float, ...]]:
    with LocalWorkers(job, plan.worker_ids, context=fork_context(), cache_dir=cache_dir, threads=1) as workers:
        records = workers.train(plan, ScheduleKind.ONE_F_ONE_B, num_sections=num_sections).records
    return statistics.median(record.duration_s for record in records[_WARM_UP:]), tuple(each.loss for each in records)


def _plan(num_blocks: int, num_microbatches: int) -> ExecutionPlan:
    stage = StageTemplate(first_layer=0, stop_layer=num_blocks + 2, node_index=0)
    template = PipelineTemplate(stages=(stage,))
    share = num_microbatches // len(_NODES)
    return ExecutionPlan(
        pipelines=tuple(Pipeline(template=template, nodes=(node,), num_microbatches=share) for node in _NODES)
    )


def _job(chosen: argparse.Namespace) -> JobSpec:
    # No dropout, so that losses can be compared.
    config = {"n_embd": chosen.hidden, "n_layer": chosen.blocks, "n_head": chosen.hidden // 64}
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": chosen.length}
    return JobSpec(
        tag="bench-sections",
        model=ModelSpec(type="gpt2", config={**config, **options}),
        data=DataSpec(sequence_length=chosen.length, vocab_size=2048, max_bytes=1_000_000),
        max_steps=chosen.steps,
        global_batch_size=chosen.microbatches * chosen.microbatch_size,
        microbatch_size=chosen.microbatch_size,
    )


if __name__ == "__main__":
    main()
