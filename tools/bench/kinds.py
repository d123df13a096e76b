"""What knowing the kinds of nodes gains: local nodes, half of them slower, planned as two kinds and as one.

    python tools/bench/kinds.py --factor 1.5

The model's layers wait instead of computing (`kinds_job.py`), so that the nodes of one machine do not take each other's
time; on the slow nodes they wait longer. Each run measures its profiles itself, and the steps of its first plan count:
a run that takes all nodes for one kind finds out later that some are slow, and plans again. `predicted` is by the
timeline of 1F1B with the profiles of both kinds, for either plan. The table is Markdown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.control.journal import JobStarted, JournalEntry, PlanAdopted, ProfileKnown, StepDone
from oobleck.planner import ExecutionPlan, Profile, profile_from_json, with_shared_links
from oobleck.runtime.journals import follow_journal
from oobleck.schedule.forecast import forecast
from tools.smoke import parse_arguments

TAG = "bench-kinds"
_WARM_UP_STEPS = 2
_TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A run, as its journal tells of it."""

    plan: ExecutionPlan
    """The first one."""
    step_s: float
    """The median of its steps."""
    profiles: dict[str, Profile]
    kind_of: dict[str, str]


def play(given: argparse.Namespace, local: str, pipelines: int | None) -> Played:
    """Train on local nodes; returns what came of it."""
    base_dir = Path(tempfile.mkdtemp(prefix="obk"))
    options = ["--tag", TAG, "--base-dir", str(base_dir), "--steps", str(given.steps), "--plain", "--resume", "never"]
    options += ["--set", "checkpoint.enabled=false", "--set", "torch_threads=1"]
    options += [] if pipelines is None else ["--pipelines", str(pipelines)]
    script = [str(Path(__file__).with_name("kinds_job.py")), "--"]
    script += [
        "--slow",
        ",".join(slow_nodes(given.nodes)),
        "--factor",
        str(given.factor),
        "--seconds",
        str(given.seconds),
    ]
    script += ["--blocks", str(given.blocks), "--microbatches", str(given.microbatches)]
    try:
        subprocess.run(
            [sys.executable, "-m", "oobleck", "up", "--local", local, *options, *script],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return _read([entry for entry in follow_journal(base_dir / TAG / "journal.jsonl") if entry is not None])
    finally:
        shutil.rmtree(base_dir, ignore_errors=True)


def _read(entries: Sequence[JournalEntry]) -> Played:
    first = next(entry for entry in entries if isinstance(entry, PlanAdopted))
    started = next(entry for entry in entries if isinstance(entry, JobStarted))
    records = [entry.record for entry in entries if isinstance(entry, StepDone)]
    steps = [record.duration_s for record in records if record.generation == first.generation][_WARM_UP_STEPS:]
    return Played(
        plan=first.plan,
        step_s=median(steps),
        profiles={
            entry.kind: profile_from_json(entry.profile_json) for entry in entries if isinstance(entry, ProfileKnown)
        },
        kind_of={spec.name: spec.kind for spec in started.nodes},
    )


def slow_nodes(num_nodes: int) -> tuple[str, ...]:
    """The second half of all."""
    return tuple(f"node{index}" for index in range(num_nodes - num_nodes // 2, num_nodes))


def predicted_s(plan: ExecutionPlan, profile_of: Callable[[str], Profile]) -> float:
    """Return the seconds of a step of a plan on nodes as they are."""
    return forecast(profile_of(plan.nodes[0]), plan, profile_of=profile_of).step_s


def _shape(plan: ExecutionPlan) -> str:
    return ", ".join(f"{'+'.join(each.nodes)}: {each.num_microbatches}" for each in plan.pipelines)


def compare(given: argparse.Namespace, pipelines: int | None) -> float:
    """Play both, and print what came of it; returns by what the measured gain misses the predicted one."""
    num_slow = len(slow_nodes(given.nodes))
    mixed = play(given, f"fast:{given.nodes - num_slow},slow:{num_slow}", pipelines)
    alike = play(given, str(given.nodes), pipelines)
    shared = dict(zip(mixed.profiles, with_shared_links(list(mixed.profiles.values())), strict=True))

    def profile_of(node: str) -> Profile:
        return shared[mixed.kind_of[node]]

    mixed_s, alike_s = predicted_s(mixed.plan, profile_of), predicted_s(alike.plan, profile_of)
    for name, played, seconds in (("two kinds", mixed, mixed_s), ("one kind", alike, alike_s)):
        ratio = played.step_s / seconds
        print(f"| {name} | {_shape(played.plan)} | {seconds:.3f} | {played.step_s:.3f} | {ratio:.3f} |")
    gain, foretold = alike.step_s / mixed.step_s, alike_s / mixed_s
    print(f"| gain | | {foretold:.3f}× | {gain:.3f}× | {gain / foretold:.3f} |")
    return abs(gain / foretold - 1)


def main() -> None:
    """Compare with the planner's own number of pipelines, and with two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4, help="half of them slow")
    parser.add_argument("--factor", type=float, default=1.5, help="how many times as long slow nodes take")
    parser.add_argument("--seconds", type=float, default=0.03, help="of a block for a microbatch, there and back")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=24, help="of a step")
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--pipelines", type=int, nargs="*", default=[0, 2], help="0: as many as the planner chooses")
    given = parse_arguments(parser, nodes=2, seconds=0.006, steps=4, microbatches=8, blocks=2, pipelines=[0])
    print(f"slow nodes ({', '.join(slow_nodes(given.nodes))}) take {given.factor:g} times as long\n")
    print("| planned as | pipelines and their microbatches | predicted, s | measured, s | measured / predicted |")
    print("|---|---|---|---|---|")
    misses = [compare(given, pipelines or None) for pipelines in given.pipelines]
    print(f"\nthe gain misses the predicted one by {100 * max(misses):.1f} % at most")


if __name__ == "__main__":
    main()
