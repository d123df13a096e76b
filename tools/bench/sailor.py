"""Plan for the profiles that Sailor's repository records, beside its own planner and its baselines.

    python tools/bench/sailor.py CHECKOUT --python PYTHON        half an hour, most of it one baseline's

CHECKOUT is a clone of github.com/eth-easl/sailor in a directory called `sailor`, PYTHON an interpreter with what its
planners import (docs/planner.md says what, and what is to be compiled first). Each plan's step is judged by the
simulator of that repository. A GPU counts as a node here, for that simulator has one kind of link; ours are asked once
for each size of microbatches that has been recorded, and the best is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.errors import PlanningError
from oobleck.planner import (
    Decision,
    DeviceProfile,
    LayerProfile,
    NetworkProfile,
    NodeKind,
    Planner,
    PlannerSettings,
    Profile,
)
from tools.bench.sailor_plans import GPUS_PER_NODE, ZONE, config_file, read
from tools.smoke import parse_arguments

MODEL = "OPT-350"
"""The only one whose profiles all of the planners have."""
SETTINGS = ("A100-40:64", "A100-40:256", "A100-40:64,V100-16:64", "A100-40:128,V100-16:128")
ONE_KIND = ("AMP", "DTFM", "FlashFlex", "Galvatron", "Metis", "Piper", "Varuna", "Sailor")
SEVERAL_KINDS = ("AMP", "FlashFlex", "Metis", "Sailor")
"""Those of the repository's planners that plan for several kinds of GPUs."""
FLOAT_BYTES = 4
OPTIMIZER_FLOATS, COPIED_FLOATS = 2, 2
"""For each parameter, beside itself and its gradient, as the repository's simulator counts them."""
RESERVED_BYTES = 2 * 10**9
"""Of each GPU, by the same."""
MEMORY_GIB = {"A100-40": 40, "V100-16": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a clone has recorded of a model: the samples of a step, and profiles by kind and size of microbatches."""

    model: str
    batch_size: int
    sequence_length: int
    layers: Mapping[str, Any]
    shapes: Mapping[str, Any]
    links: Mapping[str, Any]

    def sizes(self, kinds: Sequence[str]) -> list[int]:
        """The sizes of microbatches that were profiled on one GPU of all of the kinds."""
        each = [{int(size) for size, degrees in self.layers[kind].items() if "1" in degrees} for kind in kinds]
        return sorted(set.intersection(*each))

    def kind(self, name: str, size: int, devices_per_node: int = 1) -> NodeKind:
        """Return nodes with so many GPUs of a kind, for microbatches of so many samples."""
        degrees = tuple(
            degree
            for degree in (1, 2, 4, 8)
            if degree <= devices_per_node and str(degree) in self.layers[name][str(size)]
        )
        layers = tuple(self._layer(name, index, size, degrees) for index in sorted(self.shapes["1"], key=int))
        coefficients = self.links[name]["1"][ZONE][name]["1"][0]
        bytes_per_s = 1e9 * float(np.polyval(coefficients, np.log2(layers[0].output_bytes / 1e6)))
        network = NetworkProfile(
            inter_node_bytes_per_s=devices_per_node * bytes_per_s,  # ours is a node's; theirs, of each of its GPUs
            inter_node_latency_s=0.0,
            intra_node_bytes_per_s=bytes_per_s,
            intra_node_latency_s=0.0,
        )
        profile = Profile(
            model=self.model,
            microbatch_size=size,
            sequence_length=self.sequence_length,
            layers=layers,
            device=DeviceProfile(name=name, memory_bytes=MEMORY_GIB[name] * 2**30),
            network=network,
        )
        return NodeKind(name=name, profile=profile, devices_per_node=devices_per_node)

    def _layer(self, name: str, index: str, size: int, degrees: Sequence[int]) -> LayerProfile:
        seconds = {degree: self.layers[name][str(size)][str(degree)][index] for degree in degrees}
        shape = self.shapes["1"][index]
        kept = max(degree * self.shapes[str(degree)][index]["act_mem_floats"] for degree in degrees)
        param_bytes = FLOAT_BYTES * shape["params_floats"]
        return LayerProfile(
            name=index,
            forward_s={degree: each[0] for degree, each in seconds.items()},
            backward_s={degree: each[1] for degree, each in seconds.items()},
            param_bytes=param_bytes,
            optimizer_bytes=OPTIMIZER_FLOATS * param_bytes,
            copy_bytes=COPIED_FLOATS * param_bytes,
            activation_bytes=FLOAT_BYTES * size * kept,
            output_bytes=FLOAT_BYTES * size * shape["act_output_floats"],
        )


def recorded(checkout: Path, model: str) -> Recorded:
    """Read what a clone has recorded of a model."""
    planner, config = checkout / "sailor" / "Planner", read(config_file(checkout, model))
    return Recorded(
        model=model,
        batch_size=config["global_batch_size"],
        sequence_length=config["sequence_length"],
        layers=read(planner / "simulations" / "profiles_tmp.json")[model],
        shapes=read(planner / "llm_info.json")[model],
        links=read(checkout / "sailor" / "providers" / "multizone_bandwidths_het.json")[ZONE],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """The best of our plans, over all sizes of microbatches."""

    decision: Decision
    microbatch_size: int
    kind_of: Mapping[str, str]

    def in_their_format(self) -> dict[str, Any]:
        """Return the plan as the repository's simulator reads it, each pipeline on its own."""
        pipelines = []
        for pipeline in self.decision.plan.pipelines:
            stages = pipeline.template.stages
            kinds = [self.kind_of[pipeline.nodes[stage.node_index]] for stage in stages]
            groups = zip(kinds, stages, strict=True)
            pipelines.append(
                {
                    "num_stages": len(stages),
                    "layers_per_stage": [list(stage.layers) for stage in stages],
                    "tmp_per_stage": [[([(kind, GPUS_PER_NODE, ZONE)], stage.num_devices)] for kind, stage in groups],
                    "dp": [1] * len(stages),
                }
            )
        return {"pipeline_list": pipelines, "mbs": self.microbatch_size}


def plan_ours(known: Recorded, counts: Mapping[str, int]) -> Ours:
    """Return the plan with the least predicted step for so many GPUs of each kind."""
    # A stage of several GPUs needs nodes of one kind; a pipeline of fewer GPUs than a node has, nodes of one.
    widths = (1, GPUS_PER_NODE) if len(counts) == 1 else (1,)
    found = []
    for size in known.sizes(list(counts)):
        for width in widths:
            with contextlib.suppress(PlanningError):  # microbatches of this size may need more memory than there is
                found.append(_plan_ours(known, counts, size, width))
    return min(found, key=lambda each: each.decision.predicted_step_s)


def _plan_ours(known: Recorded, counts: Mapping[str, int], size: int, width: int) -> Ours:
    kinds = [known.kind(name, size, width) for name in counts]
    kind_of = {f"{name}-{number}": name for name, count in counts.items() for number in range(count // width)}
    settings = PlannerSettings(
        num_microbatches=known.batch_size // size,
        devices_per_node=width,
        max_devices_per_stage=width,
        reserved_memory_bytes=RESERVED_BYTES,
    )
    planner = Planner(kinds, settings, kind_of)
    return Ours(decision=planner.initial_plan(list(kind_of)), microbatch_size=size, kind_of=kind_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Theirs:
    """A clone, and how its planners are run."""

    checkout: Path
    python: str
    limit_s: float

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Return what `sailor_plans.py` answers; None where it fails, or has not answered within the limit."""
        process = subprocess.Popen(
            [self.python, str(Path(__file__).with_name("sailor_plans.py")), str(self.checkout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # some planners start programs, which end with them
        )
        try:
            said, complained = process.communicate(json.dumps(request), timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
        if process.returncode:
            print(f"{request.get('planner', 'the simulator')}: {complained.strip()[-300:]}", file=sys.stderr)
            return None
        return json.loads(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one planner came to; None for what there is not."""

    planner: str
    took_s: float | None = None
    step_s: float | None = None
    gpus: Mapping[str, int] | None = None
    plan: str = ""

    def text(self, setting: str, best_s: float | None) -> str:
        """Return the row, its step as a multiple of `best_s` too."""
        took = "–" if self.took_s is None else f"{self.took_s:.2f}"
        step = "–" if self.step_s is None else f"{self.step_s:.2f}"
        ratio = "–" if self.step_s is None or not best_s else f"{self.step_s / best_s:.2f}×"
        gpus = "–" if self.gpus is None else counted(self.gpus)
        return f"| {setting} | {self.planner} | {took} | {step} | {ratio} | {gpus} | {self.plan} |"


def row_of_ours(known: Recorded, counts: Mapping[str, int], theirs: Theirs | None, rounds: int, name: str) -> Row:
    """Plan, and have the plan judged; without a clone the step is our own prediction."""
    seconds = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        ours = plan_ours(known, counts)
        seconds.append(time.perf_counter() - began_s)
    plan = ours.decision.plan
    step_s = ours.decision.predicted_step_s
    if theirs is not None:
        shares = [each.num_microbatches for each in plan.pipelines]
        step_s = theirs.ask({"model": known.model, "plan": ours.in_their_format(), "shares": shares})
    gpus = Counter(ours.kind_of[each.node] for each in plan.worker_ids)
    shapes = Counter(
        (each.template.num_stages, max(stage.num_devices for stage in each.template.stages)) for each in plan.pipelines
    )
    said = ", ".join(
        f"{number} × {stages} stages{f' of {most} GPUs' if most > 1 else ''}"
        for (stages, most), number in sorted(shapes.items())
    )
    return Row(
        planner=name,
        took_s=statistics.median(seconds),
        step_s=step_s,
        gpus=gpus,
        plan=f"{said}; microbatches of {ours.microbatch_size}",
    )


def row_of_theirs(name: str, model: str, counts: Mapping[str, int], theirs: Theirs, rounds: int) -> Row:
    """Ask a planner of the clone."""
    answers = []
    for _ in range(rounds):
        answers.append(theirs.ask({"model": model, "planner": name, "gpus": counts}))
        if answers[-1] is None:
            return Row(planner=name, plan="no answer")
    took_s, last = statistics.median(each["took_s"] for each in answers), answers[-1]
    if "plan" not in last:
        return Row(planner=name, took_s=took_s, plan=f"none of {last['oom']} plans fits")
    return Row(planner=name, took_s=took_s, step_s=last["step_s"], gpus=last["gpus"], plan=last["plan"])


def counted(counts: Mapping[str, int]) -> str:
    return " + ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))


def counts_of(text: str) -> dict[str, int]:
    """Read `A100-40:64,V100-16:64`."""
    return {kind: int(number) for kind, number in (each.split(":") for each in text.split(","))}


def rows_of(known: Recorded, counts: Mapping[str, int], theirs: Theirs | None, chosen: argparse.Namespace) -> list[Row]:
    """The rows of a setting: ours first."""
    rows = [row_of_ours(known, counts, theirs, chosen.rounds, "Oobleck")]
    if len(counts) > 1:
        kind = max(counts, key=lambda name: (MEMORY_GIB[name], name))
        alone = {kind: counts[kind]}
        rows.append(row_of_ours(known, alone, theirs, chosen.rounds, f"Oobleck, {kind} alone"))
    if theirs is not None:
        able = ONE_KIND if len(counts) == 1 else SEVERAL_KINDS
        names = [name for name in able if name in chosen.planners]
        rows += [row_of_theirs(name, known.model, counts, theirs, chosen.rounds) for name in names]
    return rows


def record(checkout: Path) -> None:
    """Write what is read of a clone, in its format: eight layers on two kinds of GPUs."""
    planner, layers = checkout / "sailor" / "Planner", [str(index) for index in range(8)]
    floats = {"params_floats": 10**7, "act_mem_floats": 10**7, "act_output_floats": 10**6}
    seconds = {"A100-40": 0.001, "V100-16": 0.003}
    profiles = {
        kind: {str(size): {"1": {layer: [size * one, 2 * size * one, 0.001] for layer in layers}} for size in (1, 2)}
        for kind, one in seconds.items()
    }
    link = [[0.0, 0.0, 1.0], 1e9]
    links = {one: {"1": {ZONE: {other: {"1": link} for other in seconds}}} for one in seconds}
    files = {
        config_file(checkout, MODEL): {"global_batch_size": 64, "sequence_length": 2048},
        planner / "simulations" / "profiles_tmp.json": {MODEL: profiles},
        planner / "llm_info.json": {MODEL: {"1": dict.fromkeys(layers, floats)}},
        checkout / "sailor" / "providers" / "multizone_bandwidths_het.json": {ZONE: links},
    }
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, help="the clone; --smoke does without")
    parser.add_argument("--python", default=sys.executable, help="interpreter for the clone's planners")
    parser.add_argument("--planners", nargs="*", default=ONE_KIND, help="of the clone")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="GPUs of each kind")
    parser.add_argument("--rounds", type=int, default=3, help="the time to plan is the median of so many")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds that a planner has, with its start")
    small = ("A100-40:8", "A100-40:4,V100-16:4")
    chosen = parse_arguments(parser, settings=small, rounds=1)
    with tempfile.TemporaryDirectory() as directory:
        if chosen.checkout is None and not chosen.smoke:
            parser.error("CHECKOUT is missing: a clone of github.com/eth-easl/sailor")
        checkout = (chosen.checkout or Path(directory) / "sailor").resolve()
        theirs = Theirs(checkout=checkout, python=chosen.python, limit_s=chosen.limit) if chosen.checkout else None
        if theirs is None:
            record(checkout)
        known = recorded(checkout, MODEL)
        print("| GPUs | planner | plan, s | step, s | beside the best | uses | plan |")
        print("|---|---|---|---|---|---|---|")
        for setting in map(counts_of, chosen.settings):
            rows = rows_of(known, setting, theirs, chosen)
            best_s = min((row.step_s for row in rows if row.step_s is not None), default=None)
            for row in rows:
                print(row.text(counted(setting), best_s), flush=True)


if __name__ == "__main__":
    main()
