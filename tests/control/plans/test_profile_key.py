"""What a measured profile depends on has another key; what it does not depend on has the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.cli.inputs.job_file import default_job
from oobleck.control.plans import profile_key
from oobleck.job import JobSpec

JOB = default_job(4)


def key_of(job: JobSpec, *, parameters: int = 1000, memory_bytes: int = 1 << 30) -> str:
    device = ("a processor", memory_bytes, 1, 2)
    layers = ("embedding", "block", "head")
    return profile_key(job, layer_names=layers, parameters=parameters, device=device, versions=("3.11", "2.13"))


@pytest.mark.parametrize(
    "other",
    [
        replace(JOB, dtype="bfloat16"),
        replace(JOB, microbatch_size=2 * JOB.microbatch_size),
        replace(JOB, recompute="selective"),
        replace(JOB, recompute="all"),
        replace(JOB, data=replace(JOB.data, sequence_length=2 * JOB.data.sequence_length)),
        replace(JOB, optimizer=replace(JOB.optimizer, optim="sgd")),
        replace(JOB, model=replace(JOB.model, config={**JOB.model.config, "activation_function": "relu"})),
    ],
)
def test_another_precision_shape_or_optimizer_is_measured_anew(other: JobSpec) -> None:
    assert key_of(other) != key_of(JOB)


def test_another_model_or_device_is_measured_anew() -> None:
    assert len({key_of(JOB), key_of(JOB, parameters=1001), key_of(JOB, memory_bytes=1 << 31)}) == 3


def test_how_long_a_job_trains_and_what_it_is_called_does_not_count() -> None:
    others = (
        replace(JOB, tag="other"),
        replace(JOB, max_steps=JOB.max_steps + 1),
        replace(JOB, seed=JOB.seed + 1),
        replace(JOB, optimizer=replace(JOB.optimizer, learning_rate=0.5)),
    )
    assert {key_of(other) for other in others} == {key_of(JOB)}
