"""The parts of the coordinator, wired together. Only here does it say which part reads which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from oobleck.control.checkpoints import Restoring, Saving
from oobleck.control.data import Sharding
from oobleck.control.nodes import EpochLikeness, Leases, Membership, NodeRetry
from oobleck.control.scaling import Scaling
from oobleck.control.speed import LinkTiming
from oobleck.control.steps import Progress, ReplicaCheck
from oobleck.job import MAX_KINDS, JobSpec, NodeSpec
from oobleck.planner import WorkerId

from .deciding import Decider
from .going_back import GoingBack
from .hang_watch import HangWatch
from .node_lifecycle import NodeLifecycle
from .planning import planner_for
from .preparation import Preparation
from .reconfiguration import Reconfiguration
from .replanning import Replanning
from .resuming import Resuming
from .shutdown import Shutdown
from .silence import Silence
from .startup import Startup
from .worker_lifecycle import WorkerLifecycle


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Each decides one thing. It may read others and changes none: it returns what it asks of them."""

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
    silence: Silence
    hang_watch: HangWatch


def make_parts(
    job: JobSpec, nodes: tuple[NodeSpec, ...], members: Membership, *, python_version: str, run: str, resume: str
) -> Parts:
    """Return the parts of a run's coordinator; `run` is its digest, and `resume` as in `Coordinator`."""

    def training_places() -> Iterable[WorkerId]:
        return reconfiguration.training_places()

    progress = Progress(job)
    preparation = Preparation(job, members, python_version=python_version, run=run)
    link_timing = LinkTiming(job, members)
    restoring = Restoring(run=run, directory=None if resume in ("auto", "never") else resume)
    sharding = Sharding(job, progress, worker_ids=training_places)
    saving = Saving(job, members, run=run, reads_to_the_end=sharding.has_read_all)
    resuming = Resuming(job, saving, restoring, sharding, resume=resume)
    make_planner = partial(planner_for, job, kind_of=members.kinds)
    scaling = Scaling(job, members, progress)
    replanning = Replanning(members, progress, scaling, sharding, make_planner=make_planner)
    going_back = GoingBack(members, progress, saving, restoring, replanning)
    reconfiguration = Reconfiguration(job, members, progress, Decider(members, progress, replanning, going_back))
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
        startup=Startup(job, nodes, members, preparation, link_timing, resuming),
        shutdown=Shutdown(job, members, progress, saving, sharding),
        likeness=EpochLikeness(),
        replica_check=ReplicaCheck(degree=job.tensor_parallel, device_of=lambda node: members[node].spec.device),
        lifecycle=NodeLifecycle(
            members,
            NodeRetry(first_wait_s=job.control.rejoin_after_s),
            most_kinds=MAX_KINDS if job.tensor_parallel == 1 else 1,
        ),
        workers=WorkerLifecycle(members, progress),
        silence=Silence(job.control, Leases(job.control, members)),
        hang_watch=HangWatch(job.control, progress),
    )
