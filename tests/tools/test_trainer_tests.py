"""transformers' own trainer tests, with the class replaced: each is run, and told apart by what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

import pytest

from tools.trainer_tests import Row, Trial, allow_rounding, classify, report

TOOL = Path(__file__).parents[2] / "tools" / "trainer_tests.py"
TESTS = """
import unittest
import torch
from transformers import Trainer, TrainingArguments

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1, 1)

    def forward(self, x, labels=None):
        found = self.inner(x[:, None])[:, 0]
        return {"loss": (found - labels).square().mean(), "logits": found}

class Small(unittest.TestCase):
    def trained(self, **values):
        rows = [{"x": float(n), "labels": 2.0 * n} for n in range(8)]
        args = TrainingArguments("out", max_steps=2, save_strategy="no", report_to=[], use_cpu=True, **values)
        trainer = Trainer(model=Own(), args=args, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        return trainer

    def test_it_is_whatever_class(self):
        self.assertTrue(callable(Trainer.train))

    def test_it_is_skipped(self):
        self.skipTest("for want of a device")

    def test_it_trains(self):
        torch.manual_seed(1)
        first = self.trained()
        torch.manual_seed(1)
        self.assertEqual((first.state.global_step, self.trained().state.global_step), (2, 2))

    def test_it_follows_evaluations(self):
        self.trained(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch", metric_for_best_model="eval_loss")

    def test_it_is_wrong_in_any_class(self):
        self.assertEqual(1, 2)

    def test_it_asks_for_transformers_own(self):
        self.assertTrue(type(Trainer.train).__name__ == "function" and "oobleck" not in str(Trainer.__mro__))
"""


def test_numbers_of_both_classes_may_differ_in_their_last_bits() -> None:
    case = unittest.TestCase()
    allow_rounding(case)
    equal = case.assertEqual  # what transformers' tests call
    equal({"loss": [1.8705545663833618]}, {"loss": [1.8705546855926514]})
    for first, second in ((1.87055, 1.87056), ({"loss": 1.0}, {"loss": 1.0, "step": 1}), ([1.0], [1.0, 2.0])):
        with pytest.raises(AssertionError):
            equal(first, second)


@pytest.mark.slow
def test_each_test_runs_with_both_classes(tmp_path: Path) -> None:
    package = tmp_path / "checkout" / "tests" / "trainer"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    (package / "test_small.py").write_text(TESTS)
    rows = tmp_path / "rows"
    environment = {**os.environ, "OOBLECK_BASE_DIR": str(tmp_path / "base"), "OOBLECK_LOCAL": "2"}
    command = [sys.executable, str(TOOL), str(tmp_path / "checkout"), "--rows", str(rows), "--limit", "120"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stderr
    found = [Row(**json.loads(line)) for line in rows.read_text().splitlines()]
    assert {(row.test.rpartition("test_it_")[2], row.training): row.outcome for row in found} == {
        ("is_whatever_class", 0): "passes",
        ("is_skipped", 0): "skipped",
        ("trains", 1): "passes",
        ("trains", 2): "passes",
        ("follows_evaluations", 1): "refused",
        ("is_wrong_in_any_class", 0): "fails in both",
        ("asks_for_transformers_own", 0): "fails",
    }
    (refused,) = (row.note for row in found if row.outcome == "refused")
    assert "reduce_lr_on_plateau" in refused
    assert done.stdout.startswith("6 tests, 7 runs with Oobleck's class: 3 passes, 1 refused, 1 fails, ")


def test_a_test_that_fails_with_the_plain_class_is_no_fault() -> None:
    assert classify(Trial("fails", "here"), Trial("fails", "there")) == ("fails in both", "here")
    assert classify(Trial("skipped", "a GPU"), Trial("passes")) == ("skipped", "a GPU")
    assert classify(Trial("passes"), Trial("refused", "by name")) == ("refused", "by name")
    rows = [Row("a", 1, "passes"), Row("a", 2, "refused", "by name")]
    assert report(rows).splitlines() == [
        "1 tests, 2 runs with Oobleck's class: 1 passes, 1 refused, 0 fails, 0 fails in both, 0 skipped",
        "refused: a 2: by name",
    ]
