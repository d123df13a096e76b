"""What was done in some steps of training, as values: by the script itself, and by a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oobleck.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """One step: what its optimizer was given."""

    step: int
    loss: float
    grad_norm: float
    """The global norm of the gradients before they are clipped."""
    learning_rate: float
    samples: tuple[int, ...] | None = None
    """Numbers of the samples, in their order; None where they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainJob:
    """What a process without Oobleck's machinery is to train."""

    job: JobSpec
    num_steps: int
    directory: str
    """What the script writes goes there, in place of its own `output_dir`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainAccount:
    """What that process did, or why it could not."""

    steps: tuple[StepAccount, ...] = ()
    samples_on_nodes: tuple[tuple[int, ...], ...] = ()
    """The samples that a run takes in the same steps; empty where they are the same by definition."""
    dropped: Mapping[str, float] = field(default_factory=dict)
    """Probabilities that were set to zero, by their names."""
    remarks: tuple[str, ...] = ()
    """What else was made alike, because the two cannot be compared without it."""
    output_dir: str = ""
    """The script's own, if it has one."""
    problem: str = ""
    """Why the script failed; empty where it did not."""
    is_refused: bool = False
    """Whether the problem is that this cannot be compared, and no fault of the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsAsked:
    """Asks for a comparison of the model with the checkpoints of a run."""

    checkpoints: str
    """A directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How a parameter or a buffer of a run differs from the script's own."""

    name: str
    step: int
    """After which they are compared."""
    is_buffer: bool = False
    size: float = 0.0
    """The Euclidean norm of its values."""
    moved: float = 0.0
    """The norm of what training has changed of it since the start, in the script by itself."""
    difference: float = 0.0
    """The norm of the difference between the two."""
    largest: float = 0.0
    """The largest difference of one value."""
    is_noise: bool = False
    """Whether its gradients are nothing but rounding errors, so that it may move anywhere."""
    problem: str = ""
    """What is wrong with it apart from its values: it is missing, or has another shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsCompared:
    """The answer to `TensorsAsked`."""

    tensors: tuple[TensorDifference, ...] = ()
    steps: tuple[int, ...] = ()
    """After which steps they were compared."""
    problem: str = ""
    """Why no checkpoint could be read."""
