"""How often to save, as one word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.cli.inputs.values import with_save_every
from oobleck.errors import ConfigError, UsageError
from oobleck.job import CheckpointSpec, DataSpec, JobSpec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50", CheckpointSpec(save_steps=50)),
        ("90s", CheckpointSpec(save_interval_s=90.0)),
        ("1.5m", CheckpointSpec(save_interval_s=90.0)),
        ("2h", CheckpointSpec(save_interval_s=7200.0)),
        ("1d", CheckpointSpec(save_interval_s=86_400.0)),
        ("auto", CheckpointSpec()),
        ("never", CheckpointSpec(enabled=False)),
    ],
)
def test_a_word_says_how_often(text: str, expected: CheckpointSpec) -> None:
    assert with_save_every(CheckpointSpec(save_steps=3), text) == expected
    of_a_trainer = with_save_every(CheckpointSpec(save_steps=3, waits_for_disk=True), text)
    assert of_a_trainer == replace(expected, waits_for_disk=expected.save_steps is not None)


def test_steps_that_wait_for_the_disk_read_no_shards() -> None:
    with pytest.raises(ConfigError, match="waits_for_disk"):
        JobSpec(data=DataSpec(shards=("a",)), checkpoint=CheckpointSpec(save_steps=3, waits_for_disk=True))


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "50.5", "often", "1e3", "9" * 20 + "d"])
def test_anything_else_says_what_is_possible(text: str) -> None:
    with pytest.raises(UsageError, match="neither steps"):
        with_save_every(CheckpointSpec(), text)
