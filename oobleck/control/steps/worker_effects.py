"""The effects that the follower asks its driver for, and their outcomes.

A driver carries out one effect after the other and resumes the follower with the outcome. If a fence ends a wait
(`Interrupted`), a peer is lost (`PeerLost`), or data cannot be read (`ShardUnreadable`, `CorruptCheckpoint`), it throws
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
"""What a driver may throw into the follower."""


# --- orders and words ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwaitPlanUpdate:
    """Wait for an order and take it. The outcome is the `PlanUpdate`."""


@dataclass(frozen=True, slots=True)
class Say:
    """Send the master a message."""

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
class AwaitStep:
    """Wait until a step may begin, or until it is known that none follows. May be interrupted by a fence."""

    step: int


@dataclass(frozen=True, slots=True)
class ForgetStep:
    """Drop the uncommitted work on the step in flight."""


@dataclass(frozen=True, slots=True)
class BeginStep:
    """Begin a step with nothing done of it. Ends early if its records never come and the pipeline is stopped."""

    step: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Run this stage's program for some microbatches of the step, and add the results to what is done.

    Raises Interrupted once the pipeline is stopped, PeerLost and ShardUnreadable. If the step ends under the plan in
    force, the driver advances the partial commit at the end of each section but the last, and in between.
    """

    step: int
    microbatches: tuple[int, ...] | range
    num_sections: int = 1
    """All devices of a stage run the same program, whenever each begins it: they add their gradients up at the end of
    each section, committed or not."""
    ends_under_plan: bool = False
    """The plan's own reduction comes next: final sums may be posted during the last backward pass."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the gradients of a step over their owners. May be interrupted, or fail; the worker's own stay whole."""

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
    """The outcome of a commit, equal on all workers."""

    record: protocol.CommitRecord
    counted: protocol.Tally
    """The microbatches in the sum, except those that were committed before."""
    stop: bool
    save: bool


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the sums of a step to the layers, and release the layers that were kept for others."""

    record: protocol.CommitRecord


@dataclass(frozen=True, slots=True)
class Save:
    """Save this worker's share of the state after a step, shared among the nodes that are not lost."""

    step: int
    generation: int
    """The generation tells saves of one step apart."""
    committee: Committee


@dataclass(frozen=True, slots=True)
class PrepareToSave:
    """Make room for what this worker would save."""

    committee: Committee


@dataclass(frozen=True, slots=True)
class SaveEnd:
    """Save this worker's share of the state after which no step follows, and wait until it is saved."""

    over: protocol.StepsOver
    committee: Committee


@dataclass(frozen=True, slots=True)
class CompareReplicas:
    """Send the master the digests of this worker's layers after a step."""

    record: protocol.CommitRecord


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the model with all others. The outcome is an `Evaluation`. May be interrupted, or fail."""

    step: int
    committee: Committee
    stage_key: GroupKey
    lane_key: GroupKey

    @property
    def subject(self) -> protocol.Subject:
        return protocol.Subject(protocol.Topic.EVALUATION, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The outcome of an evaluation, equal on all workers."""

    loss: float | None
    """None where workers only gather the weights, for the script to evaluate."""
    num_samples: int
    duration_s: float


# --- from one plan to the next -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FormGroups:
    """Form the missing groups, and link a committee for its commits. May be interrupted, or fail.

    Groups for the committee's sums form in the background. The outcome says whether there are any.
    """

    keys: tuple[GroupKey, ...]
    committee: Committee | None


@dataclass(frozen=True, slots=True)
class AwaitGroups:
    """Wait until the groups for a committee's sums are formed. May be interrupted by a fence, or fail."""


@dataclass(frozen=True, slots=True)
class KeepGroups:
    """Discard all groups but these and those for a committee's sums: a generation is in force."""

    keys: tuple[GroupKey, ...]
    committee: Committee | None
    generation: int


@dataclass(frozen=True, slots=True)
class EndTransfers:
    """Discard the groups in which layers moved: a step is committed under the plan, so all layers have arrived."""

    keys: tuple[GroupKey, ...]


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """Read from a checkpoint the layers that this worker is to hold or to send. Raises CorruptCheckpoint."""

    update: protocol.PlanUpdate
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send the layers that others lack, and receive those that this worker lacks. May be interrupted, or fail.

    Received layers are set aside, and the worker's own do not change.
    """

    update: protocol.PlanUpdate


@dataclass(frozen=True, slots=True)
class ShareLossScale:
    """Send newcomers the loss scale of the others. May be interrupted, or fail."""

    committee: Committee | None
    """None for a spare, which takes no part."""
    is_current: bool
    """This worker holds the state from which training continues."""

    @property
    def subject(self) -> protocol.Subject:
        # There is one in a generation, and newcomers have applied no step that could tell it apart.
        return protocol.Subject(protocol.Topic.LOSS_SCALE, 0)


@dataclass(frozen=True, slots=True)
class Adopt:
    """Put a plan in force: hold its layers, and keep some for others."""

    update: protocol.PlanUpdate
    seat: PlaceInPlan | None
    """None for a spare."""
    committee: Committee | None
    layers: tuple[int, ...]
    keep: tuple[int, ...]


# --- sections of a step --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PostSection:
    """Set aside the work on a step so far, and post its sums."""

    step: int
    number: int


@dataclass(frozen=True, slots=True)
class TakeSums:
    """Take the section's sums if all have arrived: the outcome says whether. Fails with a peer; never waits."""

    number: int


@dataclass(frozen=True, slots=True)
class PostTotals:
    """Post this worker's part to the agreement that commits the section. Fails with a peer; never waits."""

    number: int


@dataclass(frozen=True, slots=True)
class TakeTotals:
    """Take that agreement's total, a `SectionTotals`, or None if it is not here. Fails with a peer; never waits."""

    number: int


@dataclass(frozen=True, slots=True)
class SectionTotals:
    """The outcome of the agreement that commits a section, equal on all workers."""

    loss: float
    counted: protocol.Tally
    num_items: int = 0
    """The tokens that count in the section."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Add the section's sums to the committed ones, and release the layers that were kept for others."""

    record: protocol.SectionRecord


@dataclass(frozen=True, slots=True)
class AwaitSection:
    """Wait for what the section needs next. May be interrupted by a fence, or fail."""

    number: int


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give up the section: the work set aside counts as done of the step again, and as not committed."""

    number: int


SectionEffect = PostSection | TakeSums | PostTotals | TakeTotals | Fold | AwaitSection | GiveBack
WorkerEffect = (
    AwaitPlanUpdate
    | Say
    | ReportResumed
    | ReportFinished
    | AwaitStep
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
    """Have a driver carry out effects in order. Raises what they raise."""
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
