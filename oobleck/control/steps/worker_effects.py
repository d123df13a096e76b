"""What the follower asks of its driver, and what it gets back.

A driver carries out one effect after the other and resumes the follower with the outcome. If a fence ends a wait
(`Interrupted`), a peer is gone (`PeerLost`), or data cannot be read (`ShardUnreadable`, `CorruptCheckpoint`), it throws
that into the follower instead. Each effect says whether it can fail; the others are always carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from oobleck.control import protocol
from oobleck.errors import CorruptCheckpoint, ShardUnreadable

from .commit_state import Interrupted, PeerLost
from .groups import Committee, GroupKey, PlaceInPlan

FAILURES = (Interrupted, PeerLost, ShardUnreadable, CorruptCheckpoint)
"""What a driver throws into the follower."""


# --- orders and words ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwaitPlanUpdate:
    """Wait for an order and take it. The outcome is the `PlanUpdate`."""


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the master."""

    message: (
        protocol.StepCommitted
        | protocol.EvaluationDone
        | protocol.PeerFailed
        | protocol.RecordsFailed
        | protocol.RestoreFailed
    )


@dataclass(frozen=True, slots=True)
class ReportResumed:
    """Tell the master that the first computation under a plan begins, and what the change took."""

    generation: int


@dataclass(frozen=True, slots=True)
class ReportFinished:
    """Tell the master that training ends with the step that is applied."""


# --- a step --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwaitRecords:
    """Wait until a step's records are known, or that none come. May be interrupted by a fence."""

    step: int


@dataclass(frozen=True, slots=True)
class ForgetStep:
    """Drop what was computed of the step in flight and is not committed."""


@dataclass(frozen=True, slots=True)
class BeginStep:
    """Begin a step, with nothing done of it. Ends early if its records never come and the pipeline is stopped."""

    step: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Run this stage's program for some microbatches of the step; what comes of it is added to what is done.

    Raises Interrupted once the pipeline is stopped, PeerLost and ShardUnreadable. At the end of each section but the
    last, and in between, the driver looks after the partial commit.
    """

    step: int
    microbatches: tuple[int, ...] | range
    num_sections: int = 1
    posts_sums: bool = False
    """The step's own reduction comes next: what is final may be posted while the last backward pass runs."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the gradients of a step over their owners. May be interrupted, or fail; own gradients stay whole."""

    step: int
    committee: Committee


@dataclass(frozen=True, slots=True)
class Agree:
    """Take part in the agreement that commits a step. The outcome is `Agreed`. May be interrupted, or fail."""

    step: int
    committee: Committee
    stop: bool
    """This worker wants training to end with the step."""

    @property
    def subject(self) -> protocol.Subject:
        return protocol.Subject(protocol.Topic.STEP, self.step)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all learn from a commit; equal everywhere."""

    record: protocol.CommitRecord
    counted: protocol.Tally
    """The microbatches that went into the sum, as often as they did; those that were committed left out."""
    stop: bool
    save: bool


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the sums of a step to the layers, and let go of those that were kept for others."""

    record: protocol.CommitRecord


@dataclass(frozen=True, slots=True)
class Save:
    """Save this worker's share of the state after a step, among all whose nodes are not lost."""

    step: int
    generation: int
    """In which it is saved: it tells saves of one step apart."""
    committee: Committee


@dataclass(frozen=True, slots=True)
class PrepareToSave:
    """Make room for what this worker would save."""

    committee: Committee


@dataclass(frozen=True, slots=True)
class SaveEnd:
    """Save this worker's share of the state with which the data ends, and wait until it is saved."""

    over: protocol.RecordsOver
    committee: Committee


@dataclass(frozen=True, slots=True)
class CompareReplicas:
    """Tell the master the digests of this worker's layers after a step."""

    record: protocol.CommitRecord


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the model with all others. The outcome is an `Evaluation`. May be interrupted, or fail."""

    step: int
    committee: Committee
    stage_key: GroupKey
    """Where the devices that share the stage sum."""
    lane_key: GroupKey
    """What links the pipeline's stages meanwhile."""

    @property
    def subject(self) -> protocol.Subject:
        return protocol.Subject(protocol.Topic.EVALUATION, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The outcome of one evaluation, equal on every rank."""

    loss: float
    num_samples: int
    duration_s: float


# --- from one plan to the next -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FormGroups:
    """Form the groups that are not there yet, and link a committee for its commits. May be interrupted, or fail.

    Those in which the committee sums are formed beside what follows. The outcome says whether there are any.
    """

    keys: tuple[GroupKey, ...]
    committee: Committee | None


@dataclass(frozen=True, slots=True)
class AwaitGroups:
    """Wait until the groups are formed in which a committee sums. May be interrupted by a fence, or fail."""


@dataclass(frozen=True, slots=True)
class KeepGroups:
    """Put all groups aside but these, and those in which a committee sums: a generation is in force."""

    keys: tuple[GroupKey, ...]
    committee: Committee | None
    generation: int


@dataclass(frozen=True, slots=True)
class EndTransfers:
    """Put aside the groups in which layers moved: a step is committed under the plan, so all of them have arrived."""

    keys: tuple[GroupKey, ...]


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """Read from a checkpoint what this worker is to hold, and what it is to send. Raises CorruptCheckpoint."""

    update: protocol.PlanUpdate
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send the layers that others lack, and receive those that this worker lacks. May be interrupted, or fail.

    What was received is set aside; the own layers are as they were.
    """

    update: protocol.PlanUpdate


@dataclass(frozen=True, slots=True)
class ShareLossScale:
    """Send newcomers the loss scale of the others. May be interrupted, or fail."""

    committee: Committee | None
    """None for a spare, which is not there to hear it."""
    is_current: bool
    """This worker holds the state from which training continues."""

    @property
    def subject(self) -> protocol.Subject:
        """Once in a generation; newcomers have applied no step."""
        return protocol.Subject(protocol.Topic.LOSS_SCALE, 0)


@dataclass(frozen=True, slots=True)
class Adopt:
    """Put a plan in force: hold its layers, received or here, and keep some for others."""

    update: protocol.PlanUpdate
    seat: PlaceInPlan | None
    """None for a spare."""
    committee: Committee | None
    layers: tuple[int, ...]
    keep: tuple[int, ...]


# --- sections of a step --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PostSection:
    """Set aside what is done of a step, and post its sums."""

    step: int
    number: int


@dataclass(frozen=True, slots=True)
class TakeSums:
    """Take the sums of the section, if they are all here: the outcome says whether. Fails with a peer; never waits."""

    number: int


@dataclass(frozen=True, slots=True)
class PostTotals:
    """Bring this worker's part to the agreement that commits the section. Fails with a peer; never waits."""

    number: int


@dataclass(frozen=True, slots=True)
class TakeTotals:
    """Take what all brought to that, if it is here: the outcome is a `SectionTotals`, or None. Never waits either."""

    number: int


@dataclass(frozen=True, slots=True)
class SectionTotals:
    """What all learn from the agreement that commits a section."""

    loss: float
    counted: protocol.Tally
    """The microbatches that are in the section, as often as they are."""
    num_items: int = 0
    """The tokens that count in them."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Add the section's sums to those that are committed, and let go of layers that were kept for others."""

    record: protocol.SectionRecord


@dataclass(frozen=True, slots=True)
class AwaitSection:
    """Wait for what the section needs next. May be interrupted by a fence, or fail."""

    number: int


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give up the section: what was set aside counts as done of the step again, and as not committed."""

    number: int


SectionEffect = PostSection | TakeSums | PostTotals | TakeTotals | Fold | AwaitSection | GiveBack
WorkerEffect = (
    AwaitPlanUpdate
    | Say
    | ReportResumed
    | ReportFinished
    | AwaitRecords
    | ForgetStep
    | BeginStep
    | Compute
    | Reduce
    | Agree
    | Apply
    | Save
    | PrepareToSave
    | SaveEnd
    | CompareReplicas
    | Evaluate
    | FormGroups
    | AwaitGroups
    | KeepGroups
    | EndTransfers
    | ReadCheckpoint
    | Exchange
    | ShareLossScale
    | Adopt
    | SectionEffect
)
EffectOutcome = protocol.PlanUpdate | Agreed | Evaluation | SectionTotals | bool | None
WorkerEffects = Generator[WorkerEffect, EffectOutcome, None]


def drive(effects: WorkerEffects, carry_out: Callable[[WorkerEffect], EffectOutcome]) -> None:
    """Have a driver carry out effects in order; it waits where it has to. Raises what they raise."""
    outcome: EffectOutcome = None
    failure: Exception | None = None
    while True:
        try:
            effect = effects.send(outcome) if failure is None else effects.throw(failure)
        except StopIteration:
            return
        outcome, failure = None, None
        try:
            outcome = carry_out(effect)
        except FAILURES as error:
            failure = error
