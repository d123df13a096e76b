"""The parts of the coordinator, wired together. Only here does it say which part knows which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from oobleck.control.checkpoints import Restoring, Saving
from oobleck.control.data import Sharding
from oobleck.control.nodes import EpochLikeness, Membership, NodeLifecycle, WorkerLifecycle, WorkerProgram
from oobleck.control.scaling import Scaling
from oobleck.control.speed import LinkTiming
from oobleck.control.steps import Progress, ReplicaCheck
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import WorkerId

from .hang_watch import HangWatch
from .planning import planner_for
from .preparation import Preparation
from .reconfiguration import Reconfiguration
from .replanning import Replanning
from .shutdown import Shutdown
from .startup import Startup


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Each decides one thing, and knows those parts alone that it reads or calls."""

    members: Membership
    """Who is there: the one table that several parts keep. The lifecycles say who comes and goes."""
    progress: Progress
    preparation: Preparation
    link_timing: LinkTiming
    saving: Saving
    restoring: Restoring
    sharding: Sharding
    replanning: Replanning
    reconfiguration: Reconfiguration
    startup: Startup
    shutdown: Shutdown
    likeness: EpochLikeness
    replica_check: ReplicaCheck
    lifecycle: NodeLifecycle
    workers: WorkerLifecycle
    hang_watch: HangWatch


def make_parts(
    job: JobSpec,
    nodes: tuple[NodeSpec, ...],
    members: Membership,
    lifecycle: NodeLifecycle,
    program: WorkerProgram,
    *,
    run: str,
    resume: str,
) -> Parts:
    """Return the parts of a run's coordinator; `run` is its digest, and `resume` as in `Coordinator`."""

    def training_places() -> Iterable[WorkerId]:
        return reconfiguration.training_places()

    progress = Progress(job)
    preparation = Preparation(job, members, run=run)
    link_timing = LinkTiming(job, members)
    restoring = Restoring(run=run, directory=None if resume in ("auto", "never") else resume)
    sharding = Sharding(job, progress, worker_ids=training_places)
    saving = Saving(job, members, run=run, reads_to_the_end=sharding.has_read_all)
    make_planner = partial(planner_for, job, kind_of=members.kinds)
    scaling = Scaling(job, members, progress)
    replanning = Replanning(members, progress, scaling, sharding, make_planner=make_planner)
    reconfiguration = Reconfiguration(job, members, lifecycle, progress, saving, restoring, sharding, replanning)
    startup = Startup(
        job,
        nodes,
        members,
        preparation,
        link_timing,
        saving,
        restoring,
        sharding,
        replanning,
        reconfiguration,
        resume=resume,
    )
    return Parts(
        members=members,
        progress=progress,
        preparation=preparation,
        link_timing=link_timing,
        saving=saving,
        restoring=restoring,
        sharding=sharding,
        replanning=replanning,
        reconfiguration=reconfiguration,
        startup=startup,
        shutdown=Shutdown(job, members, progress, saving, sharding),
        likeness=EpochLikeness(),
        replica_check=ReplicaCheck(degree=job.tensor_parallel, device_of=lambda node: members[node].spec.device),
        lifecycle=lifecycle,
        workers=WorkerLifecycle(members, lifecycle, program),
        hang_watch=HangWatch(job.control, progress),
    )
