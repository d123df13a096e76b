"""How fast training is beside PyTorch's own pipelining: the same model, batch and microbatches on one machine.

    python tools/bench/throughput.py --rounds 5
    python tools/bench/throughput.py --rounds 5 --model llama

Seven ways take turns, several times over, each in fresh processes:

    torch         torch.distributed.pipelining's Schedule1F1B, two stages cut by hand
    same cut      Oobleck's workers with the same two stages
    bubbles       the same, with the zero-bubble schedule
    torch chunks  torch's ScheduleInterleaved1F1B, two stages of two chunks each, cut by hand
    chunks        Oobleck's workers with the same four chunks, interleaved
    own plan      Oobleck's workers with the plan that its planner makes from a profile measured here
    alone         one process without a pipeline, which has all cores to itself

The step time of a turn is the median of its steps, warm-up left out; that of a way the median over its turns; the
ratios are medians of the ratios within a round, so that a machine that slows down for a while slows all of them.
All have to come to the same losses. The share of the bubble is measured by the workers themselves, as the time in
which they wait for a neighbour, and compared with the timeline of the plan's schedule on the same profile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

# Threads that wait should sleep: where a core is wanted by others too, spinning costs many times the work itself.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours, and those of processes

from oobleck.job import DataSpec, JobSpec, ModelSpec, Scalar
from oobleck.planner import (
    ExecutionPlan,
    Pipeline,
    PipelineTemplate,
    Planner,
    PlannerSettings,
    Profile,
    StageTemplate,
    WorkerId,
)
from oobleck.planner.profiles import typical_profile
from oobleck.schedule import ScheduleKind
from oobleck.schedule.choice import choose_schedule
from oobleck.schedule.forecast import forecast
from tools.bench.local_workers import Forking, LocalWorkers, fork_context
from tools.smoke import parse_arguments

if TYPE_CHECKING:
    from tools.bench.pipelining_job import StepTimes

__all__ = ["Setting", "Turn", "main", "measure"]

_NODES = ("node0", "node1")
_PLACES = tuple(WorkerId(node=node, device=0) for node in _NODES)
_NUM_CHUNKS = 2
_SCHEDULES = {"bubbles": ScheduleKind.ZERO_BUBBLE, "chunks": ScheduleKind.INTERLEAVED}
_LOSS_TOLERANCE = 1e-3
"""Float32 sums in different orders, through some steps of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is trained, and where."""

    job: JobSpec
    num_blocks: int
    warm_up: int
    """Steps at the beginning of each turn that are not timed."""
    directory: Path
    context: Forking

    def cuts(self, num_chunks: int) -> tuple[int, ...]:
        """The blocks after which each chunk but the last ends, where two stages have so many each."""
        count = 2 * num_chunks
        return tuple(self.num_blocks * number // count for number in range(1, count))

    def hand_cut(self, num_chunks: int = 1) -> ExecutionPlan:
        """Two stages with half of the blocks each."""
        ends = (0, *(1 + cut for cut in self.cuts(num_chunks)), self.num_blocks + 2)
        stages = (
            StageTemplate(first_layer=first, stop_layer=stop, node_index=index % 2)
            for index, (first, stop) in enumerate(pairwise(ends))
        )
        template = PipelineTemplate(stages=tuple(stages))
        return ExecutionPlan(
            pipelines=(Pipeline(template=template, nodes=_NODES, num_microbatches=self.job.num_microbatches),)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn of one way measured."""

    step_s: float
    losses: tuple[float, ...]
    bubble_share: float | None = None
    """Measured; None for those who do not measure it."""


def measure(setting: Setting, rounds: int) -> tuple[Profile, dict[str, list[Turn]], dict[str, ExecutionPlan]]:
    """Let the ways take turns; returns the profile of all rounds, the turns and the plans, by way."""
    profiles = [_profile(setting)]
    plans = {
        "same cut": setting.hand_cut(),
        "bubbles": setting.hand_cut(),
        "chunks": setting.hand_cut(_NUM_CHUNKS),
        "own plan": _own_plan(setting, profiles[0]),
    }
    ours = {way: partial(_oobleck_turn, setting, _schedule_of(way), plan) for way, plan in plans.items()}
    ways: dict[str, Callable[[], Turn]] = {
        "torch": partial(_torch_turn, setting, 1),
        "same cut": ours["same cut"],
        "bubbles": ours["bubbles"],
        "torch chunks": partial(_torch_turn, setting, _NUM_CHUNKS),
        "chunks": ours["chunks"],
        "own plan": ours["own plan"],
        "alone": partial(_alone_turn, setting),
    }
    turns: dict[str, list[Turn]] = {way: [] for way in ways}
    for number in range(rounds):
        # Where the machine is faster or slower than before, predictions should be of the same moments as the turns.
        profiles += [_profile(setting)] if number else []
        for way in list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]:
            turns[way].append(ways[way]())
    return typical_profile(profiles), turns, plans


def _profile(setting: Setting) -> Profile:
    with _workers(setting, _PLACES) as workers:
        return workers.profile()


def _schedule_of(way: str) -> ScheduleKind:
    return _SCHEDULES.get(way, ScheduleKind.ONE_F_ONE_B)


def _own_plan(setting: Setting, profile: Profile) -> ExecutionPlan:
    settings = PlannerSettings(num_microbatches=setting.job.num_microbatches, fault_threshold=0)
    return Planner(profile, settings).initial_plan(_NODES).plan


def _workers(setting: Setting, worker_ids: tuple[WorkerId, ...]) -> LocalWorkers:
    cache_dir = setting.directory / "cache"
    return LocalWorkers(setting.job, worker_ids, context=setting.context, cache_dir=cache_dir, threads=1)


def _oobleck_turn(setting: Setting, kind: ScheduleKind, plan: ExecutionPlan) -> Turn:
    with _workers(setting, plan.worker_ids) as workers:
        trained = workers.train(plan, kind)
    shares = []
    for pipeline in plan.pipelines:
        spent = [trained.finished[worker_id] for worker_id in pipeline.worker_ids]
        # A stage that is done before the others has waited for them until the longest is done, as in the timeline.
        whole_s = max(each.computed_s + each.waited_s for each in spent)
        shares.append(1 - sum(each.computed_s for each in spent) / (len(spent) * whole_s))
    return Turn(
        step_s=statistics.median(record.duration_s for record in trained.records[setting.warm_up :]),
        losses=tuple(record.loss for record in trained.records),
        bubble_share=statistics.fmean(shares),
    )


def _torch_turn(setting: Setting, num_chunks: int) -> Turn:
    with (
        tempfile.TemporaryDirectory(dir=setting.directory) as directory,
        ProcessPoolExecutor(2, mp_context=setting.context) as pool,
    ):
        (Path(directory) / "cache").symlink_to(setting.directory / "cache")
        run = partial(
            _train_pipelined,
            job=setting.job,
            cuts=setting.cuts(num_chunks),
            threads=1,
            directory=Path(directory),
        )
        return _turn(setting, next(iter(pool.map(run, range(2)))))


def _alone_turn(setting: Setting) -> Turn:
    with ProcessPoolExecutor(1, mp_context=setting.context) as pool:
        return _turn(setting, pool.submit(_train_alone, setting.job, 2, setting.directory).result())


# What trains loads torch; this process only starts it.
def _train_pipelined(rank: int, *, job: JobSpec, cuts: Sequence[int], threads: int, directory: Path) -> StepTimes:
    from tools.bench.pipelining_job import train_pipelined

    return train_pipelined(rank, job, cuts, threads, directory)


def _train_alone(job: JobSpec, threads: int, directory: Path) -> StepTimes:
    from tools.bench.pipelining_job import train_alone

    return train_alone(job, threads, directory)


def _turn(setting: Setting, times: StepTimes) -> Turn:
    return Turn(
        step_s=statistics.median(duration_s for duration_s, _ in times[setting.warm_up :]),
        losses=tuple(loss for _, loss in times),
    )


def _print_table(turns: dict[str, list[Turn]], tokens: int) -> None:
    print(f"{'way':<14}{'step s, median (all turns)':<52}{'tokens/s':>10}{'of torch':>10}")
    for way, measured in turns.items():
        step_s = statistics.median(turn.step_s for turn in measured)
        each = " ".join(f"{turn.step_s:.3f}" for turn in measured)
        print(
            f"{way:<14}{f'{step_s:.4f} ({each})':<52}{tokens / step_s:>10.0f}{_ratio(turns['torch'], measured):>10.3f}"
        )
    print(f"chunks: {_ratio(turns['torch chunks'], turns['chunks']):.3f} of torch's throughput with the same chunks")


def _ratio(others: Sequence[Turn], measured: Sequence[Turn]) -> float:
    """How many times the throughput of others, in the median over the rounds."""
    return statistics.median(other.step_s / turn.step_s for other, turn in zip(others, measured, strict=True))


def _print_bubbles(profile: Profile, turns: dict[str, list[Turn]], plans: dict[str, ExecutionPlan]) -> None:
    for way, plan in plans.items():
        predicted = forecast(profile, plan, kind=_schedule_of(way))
        share = predicted.pipelines[0].timeline.bubble_share
        found = statistics.median(turn.bubble_share or 0.0 for turn in turns[way])
        step_s = statistics.median(turn.step_s for turn in turns[way])
        cuts = "; ".join(
            " | ".join(f"{stage.first_layer}-{stage.stop_layer - 1}" for stage in pipeline.template.stages)
            for pipeline in plan.pipelines
        )
        print(
            f"{way}: layers {cuts}; bubble {found:.1%}, predicted {share:.1%}; "
            f"step {step_s:.4f} s, predicted {predicted.step_s:.4f} s ({step_s / predicted.step_s - 1:+.1%})"
        )


def _print_choice(profile: Profile, turns: dict[str, list[Turn]], plan: ExecutionPlan) -> None:
    """What `schedule: auto` takes for the hand-made cut, what it expects of that, and what it came to."""
    (pipeline,) = plan.pipelines
    choice = choose_schedule(profile, pipeline.template, pipeline.num_microbatches)
    ratios = [bubbles.step_s / plain.step_s for bubbles, plain in zip(turns["bubbles"], turns["same cut"], strict=True)]
    expected = forecast(profile, plan, kind=ScheduleKind.ZERO_BUBBLE).step_s / forecast(profile, plan).step_s
    print(
        f"auto takes {choice.kind.value} for this cut: zero-bubble was to take {expected:.3f} of 1f1b's time, "
        f"and took {statistics.median(ratios):.3f} ({' '.join(f'{ratio:.3f}' for ratio in ratios)})"
    )


def _check_losses(turns: dict[str, list[Turn]]) -> None:
    expected = turns["alone"][0].losses
    for way, measured in turns.items():
        for turn in measured:
            gap = max(abs(one - other) / other for one, other in zip(turn.losses, expected, strict=True))
            if gap > _LOSS_TOLERANCE:
                raise RuntimeError(f"{way} came to other losses than one process: {gap:.2e} apart")


def _model(arguments: argparse.Namespace) -> ModelSpec:
    # No dropout, so that losses can be compared; an untied head, so that torch's stages share no parameter.
    heads = arguments.hidden // 64
    if arguments.model == "llama":
        config: dict[str, Scalar] = {
            "hidden_size": arguments.hidden, "intermediate_size": arguments.hidden * 8 // 3,
            "num_hidden_layers": arguments.blocks, "num_attention_heads": heads, "num_key_value_heads": heads,
            "max_position_embeddings": arguments.length,
        }  # fmt: skip
    else:
        config = {
            "n_embd": arguments.hidden, "n_layer": arguments.blocks, "n_head": heads, "n_positions": arguments.length,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }  # fmt: skip
    return ModelSpec(type=arguments.model, config={**config, "tie_word_embeddings": False})


def _setting(arguments: argparse.Namespace, directory: Path) -> Setting:
    job = JobSpec(
        tag="bench-throughput",
        model=_model(arguments),
        data=DataSpec(sequence_length=arguments.length, vocab_size=2048, max_bytes=1_000_000),
        max_steps=arguments.steps,
        global_batch_size=arguments.microbatches * arguments.microbatch_size,
        microbatch_size=arguments.microbatch_size,
        fault_threshold=0,
        schedule="auto",  # so that both kinds are measured, and either is run
    )
    return Setting(job=job, num_blocks=arguments.blocks, warm_up=3, directory=directory, context=fork_context())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=19, help="in each turn")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens in a sample")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=2)
    chosen = parse_arguments(parser, arguments, rounds=1, steps=5, hidden=64, blocks=4, length=16, microbatches=4)
    with tempfile.TemporaryDirectory() as temporary:
        setting = _setting(chosen, Path(temporary))
        profile, turns, plans = measure(setting, chosen.rounds)
    _check_losses(turns)
    _print_table(turns, setting.job.global_batch_size * setting.job.data.sequence_length)
    _print_bubbles(profile, turns, plans)
    _print_choice(profile, turns, plans["bubbles"])


if __name__ == "__main__":
    main()
