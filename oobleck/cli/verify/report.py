"""Reports a comparison, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from oobleck.control.verification import Comparison, StepAccount, TensorsCompared, tolerance_of
from oobleck.errors import ExitCode

from .both_ways import Asked, Outcome

_VERDICTS = {ExitCode.DONE: "equal", ExitCode.DIFFERENT: "different", ExitCode.CONFIG: "refused"}
_MOST_NAMED = 5  # differences
_HEAD = (
    f"{'step':>4}  {'loss by itself':>16} {'on nodes':>16}  {'gradients':>12} {'on nodes':>12}  {'rate':>10}  samples"
)


def as_text(asked: Asked, outcome: Outcome) -> str:
    """Return the comparison as a table, and the first differences below it."""
    return "\n".join(_lines(asked, outcome))


def refused_json(reason: str) -> str:
    """Return the JSON for a job that was refused before any training."""
    return json.dumps({"verdict": "refused", "problem": reason}, indent=1)


def to_json(asked: Asked, outcome: Outcome) -> str:
    found = outcome.comparison
    steps = () if found is None else zip(found.theirs, found.ours, strict=False)
    answer = {
        "verdict": _VERDICTS.get(outcome.exit_code, "failed"),
        "problem": outcome.problem,
        "dtype": asked.job.dtype,
        "tolerance": asdict(tolerance_of(asked.job.dtype)),
        "without_dropout": dict(outcome.plain.dropped),
        "remarks": list(outcome.plain.remarks),
        "steps": [{"by_itself": asdict(theirs), "on_nodes": asdict(ours)} for theirs, ours in steps],
        "tensors": [] if found is None else [asdict(each) for each in found.tensors],
        "differences": [] if found is None else [asdict(each) for each in found.differences],
    }
    return json.dumps(answer, indent=1)


def _lines(asked: Asked, outcome: Outcome) -> Iterator[str]:
    killed = "" if asked.killed is None else f"; {asked.killed[0]} is killed after step {asked.killed[1]}"
    ways = f"by itself and on {asked.num_nodes} virtual nodes{killed}"
    yield f"{asked.name}: {asked.num_steps} steps in {asked.job.dtype}, {ways}"
    if outcome.plain.dropped:
        names = ", ".join(f"{name} {value:g}" for name, value in sorted(outcome.plain.dropped.items()))
        yield f"dropout is 0 in both, for it draws other numbers on nodes: {names}"
    yield from outcome.plain.remarks
    if outcome.comparison is not None and outcome.tensors is not None:
        yield ""
        yield from _table(outcome.comparison)
        yield from _tensors(outcome.comparison, outcome.tensors)
        yield ""
        yield from _verdict(asked, outcome.comparison)
    if outcome.problem:
        yield f"{_VERDICTS.get(outcome.exit_code, 'failed')}: {outcome.problem}"


def _table(found: Comparison) -> Iterator[str]:
    yield _HEAD
    wrong = {(difference.step, difference.what) for difference in found.differences}
    for theirs, ours in zip(found.theirs, found.ours, strict=False):
        yield _row(theirs, ours, is_other=(theirs.step, "samples") in wrong)


def _row(theirs: StepAccount, ours: StepAccount, *, is_other: bool) -> str:
    samples = "" if theirs.samples is None else "OTHERS" if is_other else "same"
    losses = f"{theirs.loss:>16.10g} {ours.loss:>16.10g}"
    norms = f"{theirs.grad_norm:>12.7g} {ours.grad_norm:>12.7g}"
    return f"{theirs.step:>4}  {losses}  {norms}  {ours.learning_rate:>10.4g}  {samples}"


def _tensors(found: Comparison, compared: TensorsCompared) -> Iterator[str]:
    for step in compared.steps:
        there = [each for each in found.tensors if each.step == step]
        names = {each.name for each in there}
        num_wrong = sum(each.step == step and each.what in names for each in found.differences)
        worst = max(there, key=lambda each: each.largest)
        num_buffers = sum(each.is_buffer for each in there)
        what = f"{len(there) - num_buffers} parameters" + (f" and {num_buffers} buffers" if num_buffers else "")
        alike = "alike" if not num_wrong else f"{num_wrong} of them differ"
        yield f"after step {step}: {what}, {alike}; the largest difference is {worst.largest:.2g}, in {worst.name}"


def _verdict(asked: Asked, found: Comparison) -> Iterator[str]:
    bounds = tolerance_of(asked.job.dtype)
    if found.are_equal:
        yield (
            f"equal, within what {asked.job.dtype} allows: {bounds.loss:g} of the loss, {bounds.grad_norm:g} of the "
            f"gradients' norm, {bounds.movement:g} of what training changes of each parameter"
        )
        return
    first, *others = found.differences
    yield f"DIFFERENT, and first: {first.text}"
    for difference in others[: _MOST_NAMED - 1]:
        yield f"  then: {difference.text}"
    if len(others) >= _MOST_NAMED:
        yield f"  and {len(others) - _MOST_NAMED + 1} more (--json lists all)"
