"""How fast sharded stages are beside torch's fully_shard, stages per device, and data parallelism without sharding.

    python tools/bench/sharding.py --rounds 5

Two virtual nodes of two devices, each device a process of one thread. The ways take turns, several times over:

    torch      fully_shard over the devices of a node, whole copies across nodes (HSDP)
    none       four copies of the model, one a device
    stages     two pipelines, each of them two stages on the devices of a node
    optimizer  two copies, each shared out by the devices of a node, and so on
    gradients
    all

The step time of a turn is the median of its steps, warm-up left out; ratios are medians of the ratios within a round,
so that a machine that slows down for a while slows all of them. All have to come to the same losses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait should sleep
sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours, and those of processes

from oobleck.job import DataSpec, JobSpec, ModelSpec, Sharding
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, StageTemplate
from oobleck.schedule import ScheduleKind
from tools.bench.local_workers import Forking, LocalWorkers, fork_context
from tools.smoke import parse_arguments

if TYPE_CHECKING:
    from tools.bench.pipelining_job import StepTimes

__all__ = ["main", "measure"]

_NODES, _DEVICES, _WARM_UP = 2, 2, 3
_LEVELS: tuple[Sharding, ...] = ("optimizer", "gradients", "all")
_LOSS_TOLERANCE = 1e-3
"""Float32 sums in different orders, through some steps of training."""

Times = list[tuple[float, float]]
"""(seconds, loss) of each step."""


def measure(job: JobSpec, num_layers: int, rounds: int, directory: Path) -> dict[str, list[Times]]:
    """Let the ways take turns; returns what each has taken, turn by turn."""
    (directory / "cache").mkdir()
    ours = partial(_turn, context=fork_context(), directory=directory)
    alone, half = StageTemplate(first_layer=0, stop_layer=num_layers, node_index=0), num_layers // 2
    shared = replace(alone, num_devices=_DEVICES)
    cut = (replace(alone, stop_layer=half), replace(alone, first_layer=half, first_device=1))
    ways: dict[str, Callable[[], Times]] = {
        "torch": partial(_torch_turn, job, fork_context(), directory),
        "none": partial(ours, job, _copies(job, (alone,), _NODES * _DEVICES)),
        "stages": partial(ours, job, _copies(job, cut, _NODES)),
    }
    for level in _LEVELS:
        sharded = replace(job, sharding=level, sharding_devices=_DEVICES)
        ways[level] = partial(ours, sharded, _copies(sharded, (shared,), _NODES))
    turns: dict[str, list[Times]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]:
            turns[way].append(ways[way]())
    return turns


def _copies(job: JobSpec, stages: Sequence[StageTemplate], count: int) -> ExecutionPlan:
    """So many nodes, with a pipeline each."""
    each = Pipeline(
        template=PipelineTemplate(stages=tuple(stages)), nodes=("",), num_microbatches=job.num_microbatches // count
    )
    return ExecutionPlan(pipelines=tuple(replace(each, nodes=(f"node{number}",)) for number in range(count)))


def _turn(job: JobSpec, plan: ExecutionPlan, *, context: Forking, directory: Path) -> Times:
    with LocalWorkers(job, plan.worker_ids, context=context, cache_dir=directory / "cache", threads=1) as workers:
        records = workers.train(plan, ScheduleKind.ONE_F_ONE_B).records
    return [(record.duration_s, record.loss) for record in records]


def _torch_turn(job: JobSpec, context: Forking, directory: Path) -> Times:
    with (
        tempfile.TemporaryDirectory(dir=directory) as inner,
        ProcessPoolExecutor(_NODES * _DEVICES, mp_context=context) as pool,
    ):
        (Path(inner) / "cache").symlink_to(directory / "cache")
        run = partial(_train_sharded, job=job, directory=Path(inner))
        return next(iter(list(pool.map(run, range(_NODES * _DEVICES)))))


# What trains loads torch; this process only starts it.
def _train_sharded(rank: int, *, job: JobSpec, directory: Path) -> StepTimes:
    from tools.bench.pipelining_job import train_sharded

    return train_sharded(rank, job, (_NODES, _DEVICES), directory)


def _step_s(times: Times) -> float:
    return statistics.median(duration_s for duration_s, _ in times[_WARM_UP:])


def _print_table(turns: dict[str, list[Times]], tokens: int) -> None:
    others = ("torch", "none", "stages")
    print(f"{'way':<11}{'step s, median (all turns)':<50}{'tokens/s':>9}" + "".join(f"{f'of {o}':>11}" for o in others))
    for way, measured in turns.items():
        seconds = [_step_s(times) for times in measured]
        each = " ".join(f"{value:.3f}" for value in seconds)
        ratios = [
            statistics.median(_step_s(times) / own for times, own in zip(turns[other], seconds, strict=True))
            for other in others
        ]
        step_s = statistics.median(seconds)
        text = "".join(f"{ratio:>11.3f}" for ratio in ratios)
        print(f"{way:<11}{f'{step_s:.4f} ({each})':<50}{tokens / step_s:>9.0f}{text}")


def _check_losses(turns: dict[str, list[Times]]) -> None:
    expected = [loss for _, loss in turns["none"][0]]
    for way, measured in turns.items():
        for times in measured:
            gap = max(abs(loss - other) / other for (_, loss), other in zip(times, expected, strict=True))
            if gap > _LOSS_TOLERANCE:
                raise RuntimeError(f"{way} came to other losses than copies without sharding: {gap:.2e} apart")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=13, help="in each turn")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--length", type=int, default=64, help="tokens in a sample")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--microbatch-size", type=int, default=4)
    chosen = parse_arguments(parser, arguments, rounds=1, steps=5, hidden=64, blocks=4, length=16, microbatches=4)
    # No dropout, so that losses can be compared.
    config = {"n_embd": chosen.hidden, "n_layer": chosen.blocks, "n_head": chosen.hidden // 64}
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": chosen.length}
    job = JobSpec(
        tag="bench-sharding",
        model=ModelSpec(type="gpt2", config={**config, **options}),
        data=DataSpec(sequence_length=chosen.length, vocab_size=2048, max_bytes=1_000_000),
        max_steps=chosen.steps,
        global_batch_size=chosen.microbatches * chosen.microbatch_size,
        microbatch_size=chosen.microbatch_size,
        fault_threshold=0,
    )
    with tempfile.TemporaryDirectory() as temporary:
        turns = measure(job, chosen.blocks + 2, chosen.rounds, Path(temporary))
    _check_losses(turns)
    _print_table(turns, job.global_batch_size * job.data.sequence_length)


if __name__ == "__main__":
    main()
