"""docs/simulation.md's table of systems: Oobleck and models of others through the same weeks of failures.

    python tools/compare.py

Each row is the mean over traces of several seeds, with its 95 % confidence interval. The job is a GPT-3 with 2.7B
parameters on A100s, 512 samples a step in microbatches of 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, it finds its neighbours

from oobleck.planner import device_sheet, estimate_profile, model_shape
from oobleck.sim import Mean, Repeated, repeat
from oobleck.sim.policies import POLICIES
from oobleck.sim.sweep import SweepSettings
from oobleck.sim.trace import FailureModel, Lost, Trace, generate
from tools.smoke import parse_arguments

_HOUR_S, _DAY_S = 3600.0, 86_400.0
_NAMES = {
    "oobleck": "**Oobleck**: the real coordinator and planner",
    "restart": "checkpoint and restart",
    "varuna": "Varuna",
    "bamboo": "Bamboo",
    "recycle": "ReCycle",
    "torchft": "torchft",
    "recover": "ReCoVer",
    "checkpointless": "HyperPod, checkpointless",
    "hotswap": "hot swap, with two spares",
    "decoupled-diloco": "Decoupled DiLoCo",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--mtbf-h", type=float, default=1.0, help="hours between losses while all nodes are there")
    parser.add_argument("--repair-h", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=5)
    given = parse_arguments(parser, arguments, nodes=8, days=0.25, seeds=2)
    for line in table(given.nodes, given.days, given.mtbf_h, given.repair_h, given.seeds):
        print(line)


def table(num_nodes: int, days: float, mtbf_h: float, repair_h: float, num_seeds: int) -> Iterator[str]:
    """Yield the table as lines of Markdown, the fastest first, and what the traces hold."""
    model = FailureModel(
        mean_lifetime_s=mtbf_h * _HOUR_S * num_nodes, batches={1: 1.0}, repairs=((1.0, repair_h * _HOUR_S),)
    )

    def make_trace(seed: int) -> Trace:
        return generate(model, num_nodes=num_nodes, duration_s=days * _DAY_S, seed=seed)

    profile = estimate_profile(model_shape("gpt3-2.7b"), device_sheet("A100"), microbatch_size=2, sequence_length=2048)
    settings = SweepSettings(profile=profile, global_batch_size=512)
    rows: list[tuple[str, Repeated]] = [
        (
            f"{_NAMES['oobleck']}, `schedule: auto`",
            repeat(make_trace, replace(settings, schedule="auto"), seeds=range(num_seeds)),
        )
    ]
    rows += [(_NAMES[name], repeat(make_trace, settings, name, seeds=range(num_seeds))) for name in POLICIES]
    yield "| | samples/s | goodput | steps lost |"
    yield "|---|---|---|---|"
    for name, found in sorted(rows, key=lambda row: -row[1].samples_per_s.value):
        goodput = f"{100 * found.goodput.value:.2f} %"
        yield f"| {name} | {_plain(found.samples_per_s, 1)} | {goodput} | {_plain(found.steps_lost, 0)} |"
    traces = [make_trace(seed) for seed in range(num_seeds)]
    losses = Mean.of(float(sum(isinstance(event, Lost) for event in trace.events)) for trace in traces)
    yield ""
    yield f"{_plain(losses, 0)} losses in {days:g} days of {num_nodes} nodes, {num_seeds} seeds"


def _plain(mean: Mean, digits: int) -> str:
    text = f"{mean.value:,.{digits}f}"
    return text if not mean.half_width else f"{text} ± {mean.half_width:,.{digits}f}"


if __name__ == "__main__":
    main()
