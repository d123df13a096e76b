"""What differs is shown to people in one line, and to programs in full."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from oobleck.cli.inputs import JobSource
from oobleck.cli.verify.both_ways import Asked, Outcome
from oobleck.cli.verify.report import as_text, refused_json, to_json
from oobleck.control.verification import (
    PlainAccount,
    StepAccount,
    TensorDifference,
    TensorsCompared,
    compare,
    tolerance_of,
)
from oobleck.errors import ExitCode
from oobleck.job import JobSpec

ASKED = Asked(job=JobSpec(), source=JobSource(), num_steps=2, num_nodes=4, began_s=0.0)
STEPS = tuple(
    StepAccount(step=step, loss=4.0 / step, grad_norm=1.5, learning_rate=0.01, samples=(1, 2)) for step in (1, 2)
)
TENSORS = TensorsCompared(
    tensors=(TensorDifference(name="head.weight", step=2, size=1.0, moved=1.0, largest=1e-7),), steps=(2,)
)


def outcome(*, loss: float = 2.0) -> Outcome:
    """Of a run whose second step has this loss."""
    plain = PlainAccount(steps=STEPS, dropped={"attn_pdrop": 0.1}, remarks=("a remark",))
    ours = (STEPS[0], replace(STEPS[1], loss=loss))
    found = compare(plain, ours, TENSORS.tensors, tolerance_of("float32"))
    code = ExitCode.DONE if found.are_equal else ExitCode.DIFFERENT
    return Outcome(exit_code=code, plain=plain, comparison=found, tensors=TENSORS)


def test_equal_steps_are_shown_with_what_was_made_alike() -> None:
    text = as_text(ASKED, outcome())
    assert "the default job: 2 steps in float32, by itself and on 4 virtual nodes; node3 is killed after step 1" in text
    assert "attn_pdrop 0.1" in text
    assert "a remark" in text
    assert "after step 2: 1 parameters, alike" in text
    assert "\nequal, within what float32 allows" in text


def test_the_first_difference_is_named() -> None:
    text = as_text(ASKED, outcome(loss=16.0))
    assert "DIFFERENT, and first: step 2: the loss is 16 on the nodes, and 2 by itself (8 times as large)" in text


def test_a_program_gets_all_numbers() -> None:
    answer = json.loads(to_json(ASKED, outcome(loss=16.0)))
    assert answer["verdict"] == "different"
    assert [(each["by_itself"]["loss"], each["on_nodes"]["loss"]) for each in answer["steps"]] == [(4, 4), (2, 16)]
    assert [each["what"] for each in answer["differences"]] == ["loss"]
    assert answer["tensors"][0]["name"] == "head.weight"


@pytest.mark.parametrize(
    ("code", "verdict"), [(ExitCode.CONFIG, "refused"), (ExitCode.FAILED, "failed"), (ExitCode.USAGE, "failed")]
)
def test_what_could_not_be_compared_is_told_with_its_reason(code: ExitCode, verdict: str) -> None:
    failed = Outcome(exit_code=code, plain=PlainAccount(), problem="by itself: it is so")
    assert as_text(ASKED, failed).endswith(f"{verdict}: by itself: it is so")
    answer = json.loads(to_json(ASKED, failed))
    assert (answer["verdict"], answer["problem"], answer["steps"]) == (verdict, "by itself: it is so", [])


def test_a_refusal_before_anything_is_trained_reads_like_any_other() -> None:
    assert json.loads(refused_json("it is so")) == {"verdict": "refused", "problem": "it is so"}


def test_a_node_is_killed_where_others_can_continue() -> None:
    assert ASKED.killed == ("node3", 1)
    assert replace(ASKED, num_nodes=2).killed is None
    assert replace(ASKED, num_steps=1).killed is None
