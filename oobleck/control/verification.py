"""Whether a run trains as the script does by itself: the accounts of both, and their first difference.

The causes within a step are, in order, its samples, their loss, the gradients, the learning rate and the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from oobleck.job import JobSpec

_NAMED = 3
"""How many of several tensors or samples a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """The inputs of one optimizer step."""

    step: int
    loss: float
    grad_norm: float
    """The global norm of the gradients before clipping."""
    learning_rate: float
    samples: tuple[int, ...] | None = None
    """The numbers of the samples, in their order; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainJob:
    """A job for a process without Oobleck's machinery."""

    job: JobSpec
    num_steps: int
    directory: str
    """Where the script writes, in place of its own `output_dir`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainAccount:
    """What that process did, or why it could not."""

    steps: tuple[StepAccount, ...] = ()
    samples_on_nodes: tuple[tuple[int, ...], ...] = ()
    """The samples that a run takes in the same steps; empty if they are the same by definition."""
    dropped: Mapping[str, float] = field(default_factory=dict)
    """The probabilities that were set to zero, by name."""
    remarks: tuple[str, ...] = ()
    """Other changes that make the two comparable."""
    output_dir: str = ""
    """The script's own, if it has one."""
    problem: str = ""
    """Why the script failed, or ''."""
    is_refused: bool = False
    """The problem is that the two cannot be compared, which is no fault of the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsAsked:
    """Asks for a comparison of the model with the checkpoints of a run."""

    checkpoints: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """The difference of a run's parameter or buffer from the script's own."""

    name: str
    step: int
    """The step after which they are compared."""
    is_buffer: bool = False
    size: float = 0.0
    """The Euclidean norm of its values."""
    moved: float = 0.0
    """The norm of its change since the start, in the script by itself."""
    difference: float = 0.0
    largest: float = 0.0
    """The largest difference of one value."""
    is_noise: bool = False
    """Its gradients are only rounding errors, so that it may move anywhere."""
    problem: str = ""
    """What is wrong apart from the values: it is missing, or has another shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsCompared:
    tensors: tuple[TensorDifference, ...] = ()
    steps: tuple[int, ...] = ()
    problem: str = ""
    """Why no checkpoint could be read, or ''."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Relative bounds."""

    loss: float
    grad_norm: float
    learning_rate: float = 1e-9
    """Both compute it in double precision."""
    movement: float
    """For the norm of a parameter's difference, relative to the norm of its movement since the start."""
    rounding: float
    """For the norm of a difference, relative to the norm of the values: half a digit of each."""
    noise: float
    """For a parameter's gradients, relative to those of all parameters: below it they are rounding errors."""


# The script sums a whole batch; a run sums its microbatches, on several workers. So sums differ by rounding, which is
# relative to the summands, and grows with the steps through the optimizer: Adam divides a gradient by its own size, so
# the error of a small gradient becomes as large as that of any other. Each bound is at least twenty times the observed
# difference of equal training, and far below that of a mistake: a loss divided by a wrong number of tokens differs by
# more than 1e-3, and a parameter that is tied or frozen in only one of the two by all of its movement.
_TOLERANCES: Mapping[str, Tolerance] = {
    "float64": Tolerance(loss=1e-6, grad_norm=1e-5, movement=1e-3, rounding=1e-12, noise=1e-12),
    "float32": Tolerance(loss=5e-5, grad_norm=1e-3, movement=2e-2, rounding=1e-6, noise=1e-6),
    "float16": Tolerance(loss=5e-3, grad_norm=5e-2, movement=0.3, rounding=1e-3, noise=1e-3),
    "bfloat16": Tolerance(loss=2e-2, grad_norm=0.1, movement=0.5, rounding=1e-2, noise=1e-2),
}
"""By the type of the computation. transformers takes the loss of a float64 model in float32."""


def tolerance_of(dtype: str) -> Tolerance:
    return _TOLERANCES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference that exceeds rounding."""

    step: int
    what: str
    """`samples`, `loss`, `grad_norm`, `learning_rate`, the name of a parameter or buffer, or `step`."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    theirs: tuple[StepAccount, ...]
    """The steps of the script by itself."""
    ours: tuple[StepAccount, ...]
    """The same steps of the run."""
    tensors: tuple[TensorDifference, ...]
    differences: tuple[Difference, ...]
    """In the order of causes; none if the run trains as the script does."""

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
        # Within a step, differences are in the order of causes, so that the first one shows where to look.
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
    if math.isnan(own) or math.isnan(found):  # training that diverges alike in both is no difference between them
        return math.isnan(own) and math.isnan(found)
    return own == found or abs(own - found) <= bound * max(abs(own), abs(found))


def _times(own: float, found: float) -> str:
    """Return by which factor a number is too large, if that may be the mistake."""
    # A wrong divisor or a sum taken twice shows as a factor far from 1.
    if not own or not math.isfinite(ratio := found / own) or abs(ratio - 1) < 0.01:
        return ""
    return f" ({ratio:.6g} times as large)"


def _differing_tensors(tensors: Iterable[TensorDifference], tolerance: Tolerance) -> Iterator[Difference]:
    """Yield those that differ after a step, the worst first."""
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
    # Not `>`, so that a difference that is not a number is wrong.
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
