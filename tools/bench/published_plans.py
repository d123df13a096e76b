"""Prints the table of docs/planner.md: what `oobleck plan` says of models that others have published times of.

    python tools/bench/published_plans.py

It needs no device: all numbers are estimates from data sheets (see "Estimates" there for each term's source).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, get_args

from oobleck.errors import PlanningError
from oobleck.job import Recompute, Sharding
from oobleck.planner import Planner, PlannerSettings, device_sheet, estimate_profile, shape_from_config
from oobleck.planner.profiles import training_flops
from oobleck.schedule.forecast import forecast

_LLAMA_3: Mapping[str, int | str | bool] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
_MIXTRAL: Mapping[str, int | str | bool] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
_QWEN3: Mapping[str, int | str | bool] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
_LENGTH = 8192
_DEVICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    config: Mapping[str, int | str | bool]
    num_nodes: int
    batch: int
    expert_parallel: bool = False
    levels: tuple[str, ...] = get_args(Recompute)


CASES = (
    Case(
        name="Llama-3 8B",
        config={
            **_LLAMA_3,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 14336,
        },
        num_nodes=4,
        batch=256,
    ),
    Case(
        name="Llama-3 70B",
        config={
            **_LLAMA_3,
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "intermediate_size": 28672,
        },
        num_nodes=16,
        batch=256,
    ),
    *(
        Case(
            name=name,
            config=config,
            num_nodes=num_nodes,
            batch=256,
            expert_parallel=expert_parallel,
            levels=("auto",),
        )
        for name, config, num_nodes in (("Mixtral 8x7B", _MIXTRAL, 16), ("Qwen3 30B-A3B", _QWEN3, 8))
        for expert_parallel in (False, True)
    ),
)


def row(case: Case, sharding: Sharding, recompute: Recompute) -> str:
    """Plan a case, on stages of one device or on sharded ones of all of a node's; return a row of the table."""
    shape, sheet = shape_from_config(case.config), device_sheet("H100")
    profile = estimate_profile(
        shape,
        sheet,
        microbatch_size=1,
        sequence_length=_LENGTH,
        recompute=recompute,
        expert_parallel=case.expert_parallel,
    )
    num_lanes = 1 if sharding == "none" else _DEVICES
    settings = PlannerSettings(num_microbatches=case.batch // num_lanes, devices_per_node=_DEVICES)
    planner = Planner(profile, settings, tensor_parallel=num_lanes, sharding=sharding, is_cast=True)
    name = f"{case.name}, experts stay" if case.expert_parallel else case.name
    cells = [name, f"{case.num_nodes} × {_DEVICES}", sharding, recompute]
    try:
        decision = planner.initial_plan([f"node{index}" for index in range(case.num_nodes)])
    except PlanningError:
        return f"| {' | '.join([*cells, 'does not fit', '', '', '', ''])} |"
    shown = forecast(planner.profile, decision.plan)
    flops = training_flops(shape, num_samples=case.batch, sequence_length=_LENGTH)
    mfu = flops / (shown.step_s * case.num_nodes * _DEVICES * sheet.bfloat16_flops)
    stages = [stage for each in decision.plan.pipelines for stage in each.template.stages]
    blocks = len(decision.plan.pipelines) * shape.num_blocks
    marks = [sum(stage.num_selective for stage in stages), sum(stage.num_recomputed for stage in stages)]
    sizes = sorted({each.template.num_stages for each in decision.plan.pipelines})
    cells += [
        f"{len(decision.plan.pipelines)} × {' or '.join(map(str, sizes))}",
        " / ".join(f"{mark / blocks:.0%}" for mark in marks) if recompute == "auto" else "",
        f"{shown.step_s:.1f} s",
        f"{shown.bubble_share:.0%}",
        f"{mfu:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="plan the smallest model alone")
    cases = CASES[:1] if parser.parse_args().smoke else CASES
    print("| model | nodes | sharding | recompute | pipelines × stages | blocks: some / all | step | waiting | MFU |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in cases:
        for sharding in get_args(Sharding)[1 if case.expert_parallel else 0 :]:
            for recompute in case.levels:
                print(row(case, cast("Sharding", sharding), cast("Recompute", recompute)))


if __name__ == "__main__":
    main()
