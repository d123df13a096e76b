"""The parts of the coordinator, wired together. Only here does it say which part knows which."""

from __future__ import annotations

from functools import partial

from oobleck.control.checkpoints import Restoring, Saving
from oobleck.control.data import Sharding
from oobleck.control.nodes import EpochLikeness, Membership, NodeLifecycle, WorkerLifecycle, WorkerProgram
from oobleck.control.scaling import Scaling
from oobleck.control.speed import LinkTiming
from oobleck.control.steps import Progress, ReplicaCheck
from oobleck.job import JobSpec, NodeSpec

from .hang_watch import HangWatch
from .planning import planner_for
from .preparation import Preparation
from .reconfiguration import Reconfiguration
from .replanning import Replanning
from .shutdown import Shutdown
from .startup import Startup


class Parts:
    """Each decides one thing, and knows those parts alone that it reads or calls."""

    def __init__(
        self,
        job: JobSpec,
        nodes: tuple[NodeSpec, ...],
        members: Membership,
        lifecycle: NodeLifecycle,
        program: WorkerProgram,
        *,
        run: str,
        resume: str,
    ) -> None:
        """`run` is the run's digest, and `resume` as in `Coordinator`."""
        self.members = members
        self.lifecycle = lifecycle
        self.workers = WorkerLifecycle(members, lifecycle, program)
        self.progress = Progress(job)
        self.hang_watch = HangWatch(job.control, self.progress)
        self.likeness = EpochLikeness()
        self.replica_check = ReplicaCheck(degree=job.tensor_parallel, device_of=lambda node: members[node].spec.device)
        self.preparation = Preparation(job, members, run=run)
        self.link_timing = LinkTiming(job, members)
        self.restoring = Restoring(run=run, directory=None if resume in ("auto", "never") else resume)
        self.sharding = Sharding(job, self.progress, worker_ids=lambda: self.reconfiguration.training_places())
        self.saving = Saving(job, members, run=run, reads_to_the_end=self.sharding.has_read_all)
        self.scaling = Scaling(job, members, self.progress)
        make_planner = partial(planner_for, job, kind_of=members.kinds)
        self.replanning = Replanning(members, self.progress, self.scaling, self.sharding, make_planner=make_planner)
        self.reconfiguration = Reconfiguration(
            job,
            members,
            lifecycle,
            self.progress,
            self.saving,
            self.restoring,
            self.sharding,
            self.scaling,
            self.replanning,
        )
        self.startup = Startup(
            job,
            nodes,
            members,
            self.preparation,
            self.link_timing,
            self.saving,
            self.restoring,
            self.sharding,
            self.replanning,
            self.reconfiguration,
            resume=resume,
        )
        self.shutdown = Shutdown(job, members, self.progress, self.saving, self.sharding)
