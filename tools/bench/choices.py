"""Prints the table of docs/planner.md: what a choice for each stage, or of a size, saves over one for all.

    python tools/bench/choices.py

It needs no device: all numbers are estimates from data sheets (see "Estimates" there), for nodes of eight A100s.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.errors import PlanningError
from oobleck.job import Recompute
from oobleck.planner import Planner, PlannerSettings, Profile, device_sheet, estimate_profile, model_shape
from oobleck.schedule.forecast import forecast
from tools.smoke import parse_arguments

_LENGTH, _BATCH, _DEVICES = 2048, 512, 8
_LEVELS: tuple[Recompute, ...] = ("none", "selective", "all")
_SIZES = (1, 2, 4, 8)
_SIZE = 4
_DEGREES = (1, 2, 4, 8)
# The nodes for each model, and the devices of a stage where these are not what is compared.
MODELS = {
    "gpt3-medium": (1, 1),
    "gpt3-2.7b": (1, 1),
    "gpt3-6.7b": (2, 1),
    "gpt3-13b": (4, 1),
    "gpt3-175b": (48, 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str
    num_nodes: int
    degree: int
    """The devices of each stage, by default."""

    def step_s(
        self, *, recompute: Recompute = "auto", size: int = _SIZE, degree: int | None = None, largest: int = 1
    ) -> float:
        """Return the event-exact seconds of a step with one pipeline or more, infinity where no plan fits.

        Stages have `degree` devices each, or up to `largest`, chosen for each.
        """
        degree = degree or (1 if largest > 1 else self.degree)
        profile = estimate_profile(
            model_shape(self.model),
            device_sheet("A100"),
            microbatch_size=size,
            sequence_length=_LENGTH,
            recompute=recompute,
            device_counts=_DEGREES if largest > 1 else sorted({1, degree}),
        )
        if degree > 1:
            profile = _of_groups(profile, degree)
        settings = PlannerSettings(
            num_microbatches=_BATCH // size,
            devices_per_node=_DEVICES,
            max_devices_per_stage=largest,
            fault_threshold=0,
        )
        try:
            planner = Planner(profile, settings, tensor_parallel=degree)
            decision = planner.initial_plan([f"node{index}" for index in range(self.num_nodes)])
        except PlanningError:
            return math.inf
        return forecast(planner.profile, decision.plan).step_s


def _of_groups(profile: Profile, degree: int) -> Profile:
    """Return a profile whose times for one device are those of `degree` devices, as a job of such groups measures."""
    layers = []
    for layer in profile.layers:
        recomputed = {name: replace(each, more_s={1: each.more_s[degree]}) for name, each in layer.recomputed.items()}
        forward_s, backward_s = {1: layer.forward_s[degree]}, {1: layer.backward_s[degree]}
        layers.append(replace(layer, forward_s=forward_s, backward_s=backward_s, recomputed=recomputed))
    return replace(profile, layers=tuple(layers))


def rows(case: Case) -> Iterator[tuple[str, Mapping[str, float], float]]:
    """Yield what is chosen, the seconds of a step with each choice for all, and those with the best of each stage."""
    auto_s = case.step_s()
    yield "recomputation", {level: case.step_s(recompute=level) for level in _LEVELS}, auto_s
    sizes = {str(size): auto_s if size == _SIZE else case.step_s(size=size) for size in _SIZES}
    yield "microbatch", sizes, min(sizes.values())
    degrees = {str(degree): auto_s if degree == case.degree else case.step_s(degree=degree) for degree in _DEGREES}
    yield "devices of a stage", degrees, case.step_s(largest=_DEVICES)


def row_text(case: Case, what: str, for_all: Mapping[str, float], chosen_s: float) -> str:
    each = ", ".join(f"{name}: {_text(seconds)}" for name, seconds in for_all.items())
    best_s, first_s = min(for_all.values()), next(iter(for_all.values()))
    gains = [f"{1 - chosen_s / seconds:.1%}" if math.isfinite(seconds) else "" for seconds in (best_s, first_s)]
    return (
        f"| {case.model} | {case.num_nodes} × {_DEVICES} | {what} | {each} | {_text(chosen_s)} | {' | '.join(gains)} |"
    )


def _text(seconds: float) -> str:
    return f"{seconds:.2f} s" if math.isfinite(seconds) else "does not fit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    given = parse_arguments(parser, models=["gpt3-medium"])
    print("| model | nodes | choice | one for all | chosen | saved of the best | of the first |")
    print("|---|---|---|---|---|---|---|")
    for model in given.models:
        num_nodes, degree = MODELS[model]
        case = Case(model=model, num_nodes=num_nodes, degree=degree)
        for what, for_all, chosen_s in rows(case):
            print(row_text(case, what, for_all, chosen_s), flush=True)


if __name__ == "__main__":
    main()
