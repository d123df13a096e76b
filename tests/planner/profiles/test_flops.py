from __future__ import annotations

import pytest

from oobleck.planner.profiles.devices import device_sheet
from oobleck.planner.profiles.estimate import ASSUMED_SHARE_OF_PEAK, estimate_profile
from oobleck.planner.profiles.shapes import model_shape, training_flops


def test_large_models_take_six_operations_a_parameter_and_token():
    shape = model_shape("gpt3-175b")
    flops = training_flops(shape, num_samples=3, sequence_length=2048)
    # Attention adds 2 · length / (hidden · 12) of it, and positions are looked up, not multiplied.
    assert flops == pytest.approx(6 * shape.num_params * 3 * 2048, rel=0.04)


def test_they_are_what_an_estimate_takes_its_time_for():
    shape, sheet = model_shape("gpt3-6.7b"), device_sheet("A40")
    profile = estimate_profile(shape, sheet, microbatch_size=8, sequence_length=2048)
    # The embedding is a look-up and takes no operations.
    seconds = sum(layer.forward_s[1] + layer.backward_s[1] for layer in profile.layers[1:])
    flops = training_flops(shape, num_samples=8, sequence_length=2048)
    assert seconds == pytest.approx(flops / (ASSUMED_SHARE_OF_PEAK * sheet.bfloat16_flops), rel=1e-6)
