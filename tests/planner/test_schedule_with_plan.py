"""Where the schedule is open, it is chosen together with the number of pipelines, their sizes and their cuts."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from oobleck.errors import PlanningError
from oobleck.planner import (
    DeviceProfile,
    ExecutionPlan,
    Planner,
    PlannerSettings,
    Profile,
    SplitBackward,
    device_sheet,
    estimate_profile,
    model_shape,
)
from oobleck.planner.zero_bubble import LEAST_GAIN
from oobleck.schedule import ScheduleKind
from oobleck.schedule.costs_of_stages import stage_costs
from oobleck.schedule.forecast import forecast
from oobleck.schedule.interleaving import make_cutter
from tests.examples import first_of
from tests.planner.drawing import ROOMY_BYTES, make_layer, make_network, make_profile
from tests.planner.test_cut_for_slow_nodes import FOREVER_S, names

FIXED = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE, ScheduleKind.INTERLEAVED)


def planner(
    profile: Profile, kind: ScheduleKind | None, num_microbatches: int, num_pipelines: int | None = None
) -> Planner:
    settings = PlannerSettings(
        num_microbatches=num_microbatches, num_pipelines=num_pipelines, mean_time_to_failure_s=FOREVER_S
    )
    return Planner(profile, settings, make_cutter=make_cutter(kind, 2))


def step_s(profile: Profile, plan: ExecutionPlan, kind: ScheduleKind | None) -> float | None:
    """The event-exact step, less what 1F1B hides of the reduction; None where the plan is over the memory."""
    found = forecast(profile, plan, kind=kind)
    if any(min(each.headroom_bytes) < 0 for each in found.pipelines):
        return None
    ends_s = []
    for each in found.pipelines:
        longest_s = max(cost.backward_s for cost in stage_costs(profile, each.template))
        is_plain = each.timeline.schedule.kind is ScheduleKind.ONE_F_ONE_B
        ends_s.append(each.timeline.makespan_s - (min(found.reduce_s, longest_s) if is_plain else 0.0))
    return max(ends_s)


def drawn(seed: int) -> tuple[Profile, int, int]:
    """A profile, a number of nodes and of microbatches."""
    draw = random.Random(seed)
    num_layers, uneven, overhead = draw.randint(6, 12), draw.choice((0.0, 0.3, 0.8)), draw.choice((None, 1.0, 1.1))
    output_bytes, param_bytes = draw.choice((0, 20, 60)), draw.choice((1, 10, 40))
    layers = []
    for _ in range(num_layers):
        seconds = draw.uniform(3 * (1 - uneven), 3 * (1 + uneven))
        part_s = (overhead or 1.0) * seconds / 3
        split = SplitBackward(forward_s=part_s, backward_input_s=part_s, backward_weight_s=part_s, kept_bytes=1)
        layers.append(
            make_layer(
                seconds,
                param_bytes=param_bytes,
                activation_bytes=draw.randint(1, 3),
                output_bytes=output_bytes,
                split=split if overhead else None,
            )
        )
    state_bytes = sum(4 * layer.param_bytes + 3 * layer.activation_bytes for layer in layers)
    memory_bytes = draw.choice((ROOMY_BYTES, state_bytes // 2))
    num_nodes = draw.randint(6, 14)
    profile = make_profile(layers, memory_bytes=memory_bytes, network=make_network())
    return profile, num_nodes, draw.choice((2, 4, 8)) * num_nodes


@pytest.mark.parametrize("seed", range(8))
def test_no_fixed_schedule_and_number_of_pipelines_is_faster(seed: int) -> None:
    profile, num_nodes, num_microbatches = drawn(seed)
    own = planner(profile, None, num_microbatches).initial_plan(names(num_nodes)).plan
    own_s = step_s(profile, own, None)
    assert own_s is not None, "it keeps to the memory"
    for number in range(min(2, len(own.pipelines)), min(num_nodes, 8) + 1):
        for kind in FIXED:
            plan = planner(profile, kind, num_microbatches, number).initial_plan(names(num_nodes)).plan
            other_s = step_s(profile, plan, kind)
            # Another schedule than 1F1B has to save a share.
            most_s = math.inf if other_s is None or len(plan.pipelines) != number else other_s / (1 - LEAST_GAIN)
            assert own_s <= most_s * (1 + 1e-9), (number, kind)


def test_zero_bubble_takes_longer_pipelines_and_a_loss_does_not_undo_the_choice() -> None:
    """32 pipelines of two nodes are best under 1F1B; so many do not let the schedule save anything."""
    profile = estimate_profile(model_shape("gpt3-2.7b"), device_sheet("A100"), microbatch_size=2, sequence_length=2048)
    nodes, kind = names(64), ScheduleKind.ZERO_BUBBLE
    chosen = planner(profile, None, 512)
    decision = chosen.initial_plan(nodes)
    own_s = step_s(profile, decision.plan, None)
    assert own_s is not None
    assert decision.predicted_step_s == pytest.approx(forecast(profile, decision.plan, kind=None).step_s, rel=0.01)
    for number in (4, 12, 32):
        other_s = step_s(profile, planner(profile, kind, 512, number).initial_plan(nodes).plan, kind)
        assert other_s is not None
        assert own_s <= 1.001 * other_s
    after = chosen.reconfigure(decision.plan, lost=[nodes[0]])
    after_s, fresh_s = (
        step_s(profile, plan, None) for plan in (after.plan, planner(profile, None, 512).initial_plan(nodes[1:]).plan)
    )
    assert after_s is not None
    assert fresh_s is not None
    assert after_s <= 1.01 * fresh_s
    assert len({item.layer for item in after.transfers}) < profile.num_layers, "most layers stay"


@pytest.mark.parametrize("kind", [None, ScheduleKind.INTERLEAVED])
@pytest.mark.parametrize("seed", first_of(10, range(100)))
def test_memory_that_is_reserved_is_memory_that_devices_lack(seed: int, kind: ScheduleKind | None) -> None:
    """Chunks keep more activations than their stage would in one, and are cut within the same limit."""
    profile, num_nodes, num_microbatches = drawn(seed)
    memory_bytes = sum(4 * layer.param_bytes + 3 * layer.activation_bytes for layer in profile.layers) // 2
    reserved_bytes = memory_bytes // 5
    device = replace(profile.device, memory_bytes=memory_bytes)
    less = replace(device, memory_bytes=memory_bytes - reserved_bytes)
    settings = PlannerSettings(num_microbatches=num_microbatches, mean_time_to_failure_s=FOREVER_S)

    def plan_of(device: DeviceProfile, reserved_bytes: int) -> ExecutionPlan | None:
        own = replace(settings, reserved_memory_bytes=reserved_bytes)
        planner = Planner(replace(profile, device=device), own, make_cutter=make_cutter(kind, 2))
        try:
            return planner.initial_plan(names(num_nodes)).plan
        except PlanningError:
            return None

    plan = plan_of(device, reserved_bytes)
    assert plan == plan_of(less, 0)
    if plan is not None:
        own = replace(profile, device=device)
        found = forecast(own, plan, kind=kind, reserved_memory_bytes=reserved_bytes)
        assert min(min(each.headroom_bytes) for each in found.pipelines) >= 0
