"""Makes the table of docs/sizing.md: the fewest nodes for models of 7 to 70 billion parameters, and what networks do.

    python tools/sizing.py

Each number is what `oobleck plan` says with the options that the page names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from oobleck.errors import PlanningError
from oobleck.planner import NodeKind, Planner, PlannerSettings, device_sheet, estimate_profile
from oobleck.planner.profiles import ModelShape, shape_from_config
from oobleck.schedule import ScheduleKind
from oobleck.schedule.forecast import forecast
from oobleck.schedule.interleaving import make_cutter

BATCH, LENGTH = 1024, 4096
GPUS = 8
GIGABITS = (400, 100, 25)
# Llama 2 of 7, 13 and 70, and Code Llama of 34 billion parameters.
MODELS: dict[str, dict[str, int]] = {
    name: {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": wide,
        "vocab_size": 32000,
    }
    for name, hidden, layers, heads, kv_heads, wide in (
        ("7B", 4096, 32, 32, 32, 11008),
        ("13B", 5120, 40, 40, 40, 13824),
        ("34B", 8192, 48, 64, 8, 22016),
        ("70B", 8192, 80, 64, 8, 28672),
    )
}
DEVICES = ("A100", "H100")


def step_s(shape: ModelShape, device: str, num_nodes: int, gigabits: int) -> float | None:
    """Predict the seconds of a step on `num_nodes` nodes; None if these do not hold two copies of the model."""
    sheet = replace(device_sheet(device), inter_node_bytes_per_s=gigabits * 1.25e8)
    profile = estimate_profile(
        shape,
        sheet,
        microbatch_size=1,
        sequence_length=LENGTH,
        recompute="all",
        device_counts=(1, 2, 4, 8),
    )
    settings = PlannerSettings(num_microbatches=BATCH, max_devices_per_stage=GPUS, fault_threshold=1)
    kind = NodeKind(name=device, profile=profile, devices_per_node=GPUS)
    planner = Planner([kind], settings, make_cutter=make_cutter(ScheduleKind.ONE_F_ONE_B, 2))
    try:
        decision = planner.initial_plan([f"node{index}" for index in range(num_nodes)])
    except PlanningError:
        return None
    return forecast(profile, decision.plan).step_s if decision.redundant else None


def rows() -> Iterator[tuple[str, str, int, tuple[float, ...]]]:
    """Yield model, device, the fewest nodes, and the seconds of a step by network."""
    for name, config in MODELS.items():
        shape = shape_from_config({"model_type": "llama", **config})
        for device in DEVICES:
            fewest = next(count for count in range(1, 65) if step_s(shape, device, count, GIGABITS[0]) is not None)
            seconds = [step_s(shape, device, fewest, gigabits) for gigabits in GIGABITS]
            yield name, device, fewest, tuple(each for each in seconds if each is not None)


def row_text(name: str, device: str, fewest: int, seconds: tuple[float, ...]) -> str:
    tokens = BATCH * LENGTH / seconds[0]
    cells = [name, device, str(fewest), f"{tokens:,.0f}", *(f"{each:.1f} s" for each in seconds)]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for row in rows():
        print(row_text(*row))
