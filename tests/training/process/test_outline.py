"""What is wrong with a job is found before its model is outlined. What an outline holds is in cli/test_dry_run.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.cli.inputs.job_file import default_job
from oobleck.errors import ConfigError
from oobleck.planner import shape_from_config
from oobleck.training.process.outline import outline_of_job
from tests.training.zoo import SPECS

JOB = default_job(4)


def test_an_optimizer_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.optim: 'nonsense'"):
        outline_of_job(replace(JOB, optimizer=replace(JOB.optimizer, optim="nonsense")))


def test_what_a_model_does_to_its_logits_is_in_its_outline() -> None:
    outline = outline_of_job(replace(JOB, model=SPECS["gemma2"]))
    assert shape_from_config(outline["config"]).changes_logits
