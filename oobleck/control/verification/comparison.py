"""Compares the steps of a run with those of the script by itself, and says what differs first.

Within a step the order is that of causes: the samples, the loss of them, the gradients, the rate that they are applied
with, and what the parameters are after that. So the first difference names where to look, and all that follows from it
comes later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .accounts import PlainAccount, StepAccount, TensorDifference
from .tolerance import Tolerance

_NAMED = 3
"""How many of several tensors or samples are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that differs by more than rounding."""

    step: int
    what: str
    """`samples`, `loss`, `grad_norm`, `learning_rate`, the name of a parameter or buffer, or `step`."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that was compared."""

    theirs: tuple[StepAccount, ...]
    """Of the script by itself."""
    ours: tuple[StepAccount, ...]
    """Of the run, as many."""
    tensors: tuple[TensorDifference, ...]
    differences: tuple[Difference, ...]
    """In the order of causes; none: the run trains as the script does."""

    @property
    def are_equal(self) -> bool:
        return not self.differences


def compare(
    theirs: PlainAccount, ours: Sequence[StepAccount], tensors: Sequence[TensorDifference], tolerance: Tolerance
) -> Comparison:
    """Compare the script by itself with a run. O(steps + tensors)."""
    of_run = {step.step: step for step in ours}
    differences: list[Difference] = []
    for index, step in enumerate(theirs.steps):
        on_nodes = theirs.samples_on_nodes[index] if index < len(theirs.samples_on_nodes) else None
        differences += _differing_samples(step, on_nodes)
        if (found := of_run.get(step.step)) is None:
            text = f"step {step.step} was not done on the nodes"
            differences.append(Difference(step=step.step, what="step", text=text))
        else:
            differences += _differing_numbers(step, found, tolerance)
        differences += _differing_tensors([each for each in tensors if each.step == step.step], tolerance)
    return Comparison(
        theirs=theirs.steps,
        ours=tuple(of_run[step.step] for step in theirs.steps if step.step in of_run),
        tensors=tuple(tensors),
        differences=tuple(differences),
    )


def _differing_samples(step: StepAccount, on_nodes: tuple[int, ...] | None) -> Iterator[Difference]:
    if step.samples is None or on_nodes is None or step.samples == on_nodes:
        return
    if sorted(step.samples) == sorted(on_nodes):
        how = f"the same samples in another order, {_some(on_nodes)} in place of {_some(step.samples)}"
    else:
        how = f"other samples, {_some(on_nodes)} in place of {_some(step.samples)}"
    yield Difference(step=step.step, what="samples", text=f"step {step.step} takes {how}")


def _differing_numbers(theirs: StepAccount, ours: StepAccount, tolerance: Tolerance) -> Iterator[Difference]:
    for what, called, bound in (
        ("loss", "the loss", tolerance.loss),
        ("grad_norm", "the norm of the gradients", tolerance.grad_norm),
        ("learning_rate", "the learning rate", tolerance.learning_rate),
    ):
        own, found = getattr(theirs, what), getattr(ours, what)
        if not _is_close(own, found, bound):
            numbers = f"{found:.9g} on the nodes, and {own:.9g} by itself{_times(own, found)}"
            yield Difference(step=theirs.step, what=what, text=f"step {theirs.step}: {called} is {numbers}")


def _is_close(own: float, found: float, bound: float) -> bool:
    if math.isnan(own) or math.isnan(found):
        return math.isnan(own) and math.isnan(found)
    return own == found or abs(own - found) <= bound * max(abs(own), abs(found))


def _times(own: float, found: float) -> str:
    """Say how many times as large a number is, where that may be what is wrong with it."""
    if not own or not math.isfinite(ratio := found / own) or abs(ratio - 1) < 0.01:
        return ""
    return f" ({ratio:.6g} times as large)"


def _differing_tensors(tensors: Iterable[TensorDifference], tolerance: Tolerance) -> Iterator[Difference]:
    """Of those that differ after a step, the worst first."""
    wrong = [each for each in tensors if _is_wrong(each, tolerance)]
    wrong.sort(key=lambda each: (not each.problem, -_relative(each), each.name))
    for each in wrong:
        kind = "buffer" if each.is_buffer else "parameter"
        yield Difference(step=each.step, what=each.name, text=f"{kind} {each.name} {_how(each)}")


def _is_wrong(tensor: TensorDifference, tolerance: Tolerance) -> bool:
    if tensor.problem:
        return True
    if tensor.is_noise:
        return False
    return not tensor.difference <= tolerance.movement * tensor.moved + tolerance.rounding * tensor.size


def _relative(tensor: TensorDifference) -> float:
    return tensor.difference / tensor.moved if tensor.moved else math.inf


def _how(tensor: TensorDifference) -> str:
    if tensor.problem:
        return tensor.problem
    if not tensor.moved:
        return f"is changed by step {tensor.step} on the nodes, by up to {tensor.largest:.3g}, and not by itself"
    return (
        f"differs after step {tensor.step} by up to {tensor.largest:.3g}, in all by {_relative(tensor):.3g} of what "
        "training has changed of it"
    )


def _some(samples: Sequence[int]) -> str:
    rest = len(samples) - _NAMED
    return f"[{', '.join(map(str, samples[:_NAMED]))}{', …' if rest > 0 else ''}]"
