"""The parts of the coordinator, wired together. Only this module says which part knows which."""

from __future__ import annotations

from functools import partial

from oobleck.control.checkpoints import Restoring, Saving
from oobleck.control.data import Sharding
from oobleck.control.nodes import EpochLikeness, Membership, NodeLifecycle, WorkerLifecycle, WorkerProgram
from oobleck.control.scaling import Scaling
from oobleck.control.speed import LinkTiming
from oobleck.control.steps import PlanHistory, Progress, ReplicaCheck
from oobleck.job import JobSpec, NodeSpec

from .consent import Consent
from .decision import Decider
from .hang_watch import HangWatch
from .planning import planner_for, schedules_for
from .preparation import Preparation
from .reconfiguration import Reconfiguration
from .replanning import Replanning
from .shutdown import Shutdown
from .startup import CONTINUING, Startup


class Parts:
    """Each part decides one thing, and knows only the parts that it reads or calls."""

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
        progress = self.progress = Progress(job)
        self.hang_watch = HangWatch(job.control, progress)
        self.likeness = EpochLikeness()
        self.replica_check = ReplicaCheck(
            degree=job.devices_per_stage, device_of=lambda node: members[node].spec.device
        )
        preparation = self.preparation = Preparation(job, members, run=run)
        link_timing = self.link_timing = LinkTiming(job, members)
        directory = None if resume in {*CONTINUING, "never"} else resume
        restoring = self.restoring = Restoring(run=run, directory=directory)
        sharding = self.sharding = Sharding(job, progress, worker_ids=lambda: self.reconfiguration.training_places())
        consent = self.consent = Consent(
            job,
            progress,
            worker_ids=lambda: self.reconfiguration.training_places(),
            let_begin=lambda: self.saving.let_begin(),
        )
        saving = self.saving = Saving(job, members, run=run, reads_to_the_end=sharding.has_read_all)
        scaling = self.scaling = Scaling(job, members, progress)
        make_planner = partial(planner_for, job, kind_of=members.kinds, domain_of=members.domains)
        replanning = self.replanning = Replanning(
            job, members, progress, scaling, sharding, consent, partial(schedules_for, job), make_planner
        )
        shutdown = self.shutdown = Shutdown(job, members, progress, saving, sharding)
        decider = Decider(members, lifecycle, progress, saving, restoring, replanning, shutdown)
        history = PlanHistory(max_steps=job.max_steps)
        recovery = self.reconfiguration = Reconfiguration(
            job,
            members,
            lifecycle,
            progress,
            saving,
            restoring,
            sharding,
            consent,
            scaling,
            replanning,
            decider,
            history,
        )
        self.startup = Startup(
            job, nodes, members, preparation, link_timing, saving, restoring, sharding, replanning, recovery, resume
        )
