"""Zero-bubble is chosen where the timeline says that it saves time and fits, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner import PipelineTemplate, Profile, SplitBackward, StageTemplate
from oobleck.schedule import ScheduleKind, compile_schedule, timeline
from oobleck.schedule.choice import LEAST_GAIN, choose_schedule
from oobleck.schedule.costs_of_stages import stage_costs
from tests.planner.drawing import ROOMY_BYTES, profiles, uniform_profile

PLAIN, SPLIT = ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE


def template(*stops: int) -> PipelineTemplate:
    """Stages that end at these layers, each on a node of its own."""
    bounds = pairwise((0, *stops))
    return PipelineTemplate(
        stages=tuple(
            StageTemplate(first_layer=first, stop_layer=stop, node_index=index)
            for index, (first, stop) in enumerate(bounds)
        )
    )


def with_split(profile: Profile, *, overhead: float = 1.0, kept_bytes: int = 1) -> Profile:
    """Layers whose backward pass can be halved, both parts and the forward pass so many times as long."""
    return replace(
        profile,
        layers=tuple(
            replace(
                layer,
                split=SplitBackward(
                    forward_s=overhead * layer.forward_s[1],
                    backward_input_s=overhead * layer.backward_s[1] / 2,
                    backward_weight_s=overhead * layer.backward_s[1] / 2,
                    kept_bytes=kept_bytes,
                ),
            )
            for layer in profile.layers
        ),
    )


@given(profile=profiles(min_layers=2), data=st.data())
def test_it_is_never_slower_than_1f1b_nor_larger_than_the_memory(profile: Profile, data: st.DataObject) -> None:
    cuts = data.draw(st.sets(st.integers(1, profile.num_layers - 1), min_size=1))
    chain = template(*sorted(cuts), profile.num_layers)
    num_microbatches = data.draw(st.integers(1, 12))
    reduce_s = data.draw(st.sampled_from((0.0, 0.5, 5.0)))
    found = choose_schedule(profile, chain, num_microbatches, reduce_s=reduce_s)
    lines = {
        kind: timeline(
            compile_schedule(kind, num_stages=chain.num_stages, num_microbatches=num_microbatches),
            stage_costs(profile, chain, reduce_s=reduce_s, splits=kind is SPLIT),
        )
        for kind in (PLAIN, SPLIT)
    }
    fits = max(lines[SPLIT].peak_memory_bytes) <= profile.device.memory_bytes
    hidden_s = min(reduce_s, max(cost.backward_s for cost in lines[PLAIN].costs))
    share = lines[SPLIT].makespan_s / (lines[PLAIN].makespan_s - hidden_s)
    if found.kind is SPLIT:
        assert fits
        assert share <= 1 - LEAST_GAIN + 1e-12, "though 1F1B hid as much of the reduction as it can"
        assert found.saved >= LEAST_GAIN
    else:
        assert found.saved == 0
        assert not fits or share > 1 - LEAST_GAIN - 1e-12
    assert found.timeline == lines[found.kind]


def test_stages_that_wait_for_each_other_get_it() -> None:
    found = choose_schedule(with_split(uniform_profile(4)), template(1, 2, 3, 4), 8)
    assert found.kind is SPLIT
    # 4 stages, 8 microbatches of 1 s forward and 2 s back: bubbles of 3 · 3 s and of 3 · 1 s, and messages both ways.
    assert found.saved == pytest.approx(1 - (24 + 3) / (24 + 9), abs=0.02)


def test_a_profile_without_parts_counts_half_for_each() -> None:
    assert choose_schedule(uniform_profile(4), template(1, 2, 3, 4), 8).kind is SPLIT


@pytest.mark.parametrize("num_microbatches", [0, 1, 8])
def test_a_single_stage_has_no_bubble_to_save(num_microbatches: int) -> None:
    assert choose_schedule(with_split(uniform_profile(4)), template(4), num_microbatches).kind is PLAIN


def test_parts_that_take_longer_than_the_bubbles_are_not_worth_it() -> None:
    slow = with_split(uniform_profile(4), overhead=1.4)
    assert choose_schedule(slow, template(1, 2, 3, 4), 8).kind is PLAIN
    assert choose_schedule(with_split(uniform_profile(4), overhead=1.1), template(1, 2, 3, 4), 8).kind is SPLIT


def test_a_reduction_that_1f1b_hides_may_be_more_than_the_bubbles() -> None:
    # Two stages of 2 s forward and 4 s back wait for 6 s, of which zero-bubble saves 2; the last backward pass hides 4.
    profile = with_split(uniform_profile(4))
    assert choose_schedule(profile, template(2, 4), 8, reduce_s=1.0).kind is SPLIT
    assert choose_schedule(profile, template(2, 4), 8, reduce_s=10.0).kind is PLAIN


def test_1f1b_hides_no_more_of_a_reduction_than_its_last_backward_pass_takes() -> None:
    """Four stages of 1 s forward and 2 s back wait for 9 s, of which zero-bubble saves 6; a backward pass hides 2."""
    found = choose_schedule(with_split(uniform_profile(4)), template(1, 2, 3, 4), 8, reduce_s=10.0)
    assert found.kind is SPLIT
    assert found.saved == pytest.approx(1 - (24 + 3 + 10) / (24 + 9 + 10 - 2), abs=0.02)


def test_memory_that_only_1f1b_fits_decides() -> None:
    """What waits between the two parts counts: gradients, and activations of more microbatches."""
    chain = template(1, 2, 3, 4)
    needed = max(choose_schedule(with_split(uniform_profile(4), kept_bytes=50), chain, 8).timeline.peak_memory_bytes)
    for memory_bytes, kind in ((needed, SPLIT), (needed - 1, PLAIN), (ROOMY_BYTES, SPLIT)):
        profile = with_split(uniform_profile(4, memory_bytes=memory_bytes), kept_bytes=50)
        assert choose_schedule(profile, chain, 8).kind is kind
    profile = with_split(uniform_profile(4, memory_bytes=needed), kept_bytes=50)
    assert choose_schedule(profile, chain, 8, reserved_memory_bytes=1).kind is PLAIN
