"""What a clone of Sailor's repository decides: one of its planners asked for plans, or its simulator for their steps.

    python tools/bench/sailor_plans.py CHECKOUT < request.json > answer.json

A process of its own for each request: the planners change the working directory's files, write to standard output, and
need packages that this project does not (`--python` of `sailor.py` names the interpreter). They are called as the
repository's own `simulations/simulator.py` calls them, and plans keep its format. It knows nothing of our planner.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Json = Any
"""A value of a JSON document: the repository's formats are its own affair."""

ZONE = "us-central1-a"
GPUS_PER_NODE = 4
KINDS_IN_A_FILE = ("AMP", "Metis")
"""Planners that are given the profiles of all kinds, as a directory."""


class Checkout:
    """A clone, and the model to plan for."""

    def __init__(self, directory: Path, model: str) -> None:
        self.planner = directory / "sailor" / "Planner"
        # Its planners find their files from a directory that has the clone under the name `sailor`.
        os.environ.update(SAILOR_PATH=str(directory.parent), MAKEFLAGS="n")
        # In place of this file's own directory, where `sailor` is another module.
        sys.path[:1] = [str(directory), str(self.planner / "simulations")]
        self.model = model
        self.config_file = config_file(directory, model)
        self.config = read(self.config_file)
        self.shapes = read(self.planner / "llm_info.json")

    def make(self, name: str, counts: Mapping[str, int]) -> Json:
        """Return a planner of the repository, made as its simulator makes it."""
        profiles = self.planner / "baselines" / name / "profiles" / self.model
        device = next(iter(counts))
        if name == "Sailor":
            quotas = Path("quotas.json")
            quotas.write_text(json.dumps({kind: {ZONE: number} for kind, number in counts.items()}), encoding="utf-8")
            own = f"{self.planner / 'sailor_planner' / 'profiles' / self.model}/"
            module = importlib.import_module("sailor.Planner.sailor_planner.cpp_src.planner")
            return module.SailorPlanner(own, str(self.config_file), str(quotas), "throughput", False)
        module = importlib.import_module(f"sailor.Planner.baselines.{name}.{name.lower()}_planner")
        make = getattr(module, f"{name}Planner")
        made: dict[str, Callable[[], Json]] = {
            "AMP": lambda: make(str(profiles), "throughput"),
            "DTFM": lambda: make("", str(self.config_file), self.shapes, False),
            "FlashFlex": lambda: make(str(self.planner / "baselines" / name / "src" / "machine_amounts.json")),
            "Galvatron": lambda: make(str(self.config_file), str(profiles / device), "throughput"),
            "Metis": lambda: make(str(profiles), str(self.config_file)),
            "Piper": lambda: make(str(profiles / device / "profile.json")),
            "Varuna": lambda: make(str(profiles / device / f"profile_{GPUS_PER_NODE}.json"), "throughput"),
        }
        return made[name]()

    def cluster(self, name: str, counts: Mapping[str, int]) -> Json:
        """Return a cluster as a planner of the repository takes it: counts are of GPUs."""
        machines = read(self.planner / "simulations" / "configs" / "basic_cluster_config.json")
        sheets = {
            kind: {
                "num_nodes": number // GPUS_PER_NODE,
                "gpus_per_node": GPUS_PER_NODE,
                "mem_per_gpu": machines[kind]["mem_per_gpu"],
            }
            for kind, number in counts.items()
        }
        located = {f"{kind}_{ZONE}": number for kind, number in counts.items()}
        if name == "Sailor":
            return {**located, "max_cost": 0.0, "min_throughput": 0.0}
        if name == "DTFM":
            return {**located, "gpu_types": list(counts), "gpus_per_node": dict.fromkeys(counts, GPUS_PER_NODE)}
        if name in (*KINDS_IN_A_FILE, "FlashFlex"):
            return {**sheets, "zone": ZONE}
        (kind,) = counts
        return {"gpu_type": kind, "zone": ZONE, **sheets[kind]}

    def plan(self, name: str, counts: Mapping[str, int]) -> Json:
        """Return the first of a planner's plans that fits into memory, what finding it took, and its step."""
        planner, cluster = self.make(name, counts), self.cluster(name, counts)
        began_s = time.perf_counter()
        plans = planner.get_sorted_plans(cluster_config=cluster, training_config=self.config)
        took_s = time.perf_counter() - began_s
        simulator = self.simulator()
        for number, plan in enumerate(plans):
            one_vm_each(plan)
            if simulator.check_config_fits(plan):
                step_s = float(simulator.simulate_iteration_time(plan)[0])
                words = described(simulator, plan)
                return {"took_s": took_s, "step_s": step_s, "gpus": plan["used_gpus"], "oom": number, "plan": words}
        return {"took_s": took_s, "oom": len(plans)}

    def judge(self, plan: Json, shares: list[int]) -> float:
        """Return the seconds of a step whose pipelines take so many microbatches each.

        The repository's simulator divides the batch evenly. Its own two terms are taken apart for that: each pipeline's
        time with its share, and the reduction among as many pipelines, of the pipeline where that takes longest.
        """
        runtime = importlib.import_module("sailor.Planner.simulations.runtime_simulator")
        simulator = self.simulator()
        assert simulator.check_config_fits(plan), "does not fit by the repository's simulator"
        pipelines_s, reductions_s = [], []
        for pipeline, share in zip(plan["pipeline_list"], shares, strict=True):
            simulator.global_batch_size = share * plan["mbs"]
            pipelines_s.append(float(simulator.simulate_iteration_time({**plan, "pipeline_list": [pipeline]})[0]))
            stages = [stage * len(shares) for stage in pipeline["tmp_per_stage"]]
            alike = {**pipeline, "tmp_per_stage": stages, "dp": [len(shares)] * len(stages)}
            converted = runtime.convert_homogeneous({**plan, "pipeline_list": [alike]}, self.config)
            reductions_s.append(float(simulator.estimate_sync_time(converted)))
        return max(pipelines_s) + max(reductions_s)

    def simulator(self) -> Json:
        module = importlib.import_module("sailor.Planner.simulations.runtime_simulator")
        profiles = read(self.planner / "simulations" / "profiles_tmp.json")
        root = os.environ["SAILOR_PATH"]
        return module.Simulator(root, self.config, self.shapes, False, profiles, zone=ZONE)


def one_vm_each(plan: Json) -> None:
    """Name a machine once where a stage's tensor-parallel GPUs are of one: the simulator omits compute elsewhere."""
    for pipeline in plan.get("pipeline_list", ()):
        for stage in pipeline["tmp_per_stage"]:
            for index, (machines, degree) in enumerate(stage):
                if len({tuple(each) for each in machines}) == 1 and degree <= machines[0][1]:
                    stage[index] = (machines[:1], degree)


def described(simulator: Json, plan: Json) -> str:
    """Say what a plan is: pipelines, and for each number of stages, the degrees of tensor and data parallelism."""
    whole = simulator.simulate_iteration_time(plan)[2]
    shapes = Counter(
        (len(stages), *extremes(degree for stage in stages for _, degree in stage), *extremes(each["dp_degrees"]))
        for each in whole["pipelines"]
        for stages in (each["tmp_stages"],)
    )
    found = [
        f"{number * least_dp if least_dp == most_dp else f'{least_dp} to {most_dp}'} × {stages} stages"
        + (f" of {least} to {most} GPUs" if least != most else f" of {most} GPUs" if most > 1 else "")
        for (stages, least, most, least_dp, most_dp), number in sorted(shapes.items())
    ]
    return f"{', '.join(found)}; microbatches of {whole['mbs']}"


def extremes(numbers: Iterable[int]) -> tuple[int, int]:
    found = sorted(numbers)
    return found[0], found[-1]


def config_file(directory: Path, model: str) -> Path:
    """The clone's file that says how a model is trained."""
    name = model.lower().replace("-", "_").replace("2.7", "27").replace("gpt_neo_", "gpt_neo")
    return directory / "sailor" / "Planner" / "simulations" / "configs" / f"training_config_{name}.json"


def read(path: Path) -> Json:
    return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Send what this process and its children print to nowhere: standard output is for the answer alone."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def main() -> None:
    request = json.load(sys.stdin)
    checkout = Checkout(Path(sys.argv[1]).resolve(), request["model"])
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory), silent():
        if "planner" in request:
            answer = checkout.plan(request["planner"], request["gpus"])
        else:
            answer = checkout.judge(request["plan"], request["shares"])
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
