"""The parts of the coordinator, wired together. Here, and nowhere else, is said who knows whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from oobleck.control.checkpoints import Restoring, Saving
from oobleck.control.commit import Progress, ReplicaCheck
from oobleck.control.data import Sharding
from oobleck.control.events import Effects
from oobleck.control.membership import Leases, Membership, NodeRetry
from oobleck.control.scaling import Scaling
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import WorkerId

from .deciding import Decider
from .going_back import GoingBack
from .node_lifecycle import NodeLifecycle
from .ordering import Ordering
from .planning import planner_for
from .preparation import Preparation
from .reconfiguration import Reconfiguration
from .replanning import Replanning
from .resuming import Resuming
from .shutdown import Shutdown
from .startup import Startup

__all__ = ["Parts", "make_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Each decides one thing. They collect their commands in `effects`, in order."""

    effects: Effects
    members: Membership
    progress: Progress
    preparation: Preparation
    saving: Saving
    restoring: Restoring
    scaling: Scaling
    sharding: Sharding
    reconfiguration: Reconfiguration
    startup: Startup
    shutdown: Shutdown
    replica_check: ReplicaCheck
    node_retry: NodeRetry
    lifecycle: NodeLifecycle
    leases: Leases


def make_parts(
    job: JobSpec, nodes: tuple[NodeSpec, ...], members: Membership, *, python_version: str, run: str, resume: str
) -> Parts:
    """Return the parts of a run's coordinator; `run` is its digest, and `resume` as in `Coordinator`."""

    def training_places() -> Iterable[WorkerId]:
        return reconfiguration.training_places()

    num_devices = nodes[0].num_devices
    effects = Effects()
    progress = Progress(job, effects)
    preparation = Preparation(job, members, python_version=python_version, run=run)
    saving = Saving(job, members, effects, run=run)
    restoring = Restoring(effects, run=run, directory=None if resume in ("auto", "never") else resume)
    scaling = Scaling(job, members, progress, effects)
    sharding = Sharding(job, progress, effects, worker_ids=training_places)
    saving.judge_end(sharding.has_read_all)
    make_planner = partial(planner_for, job, devices_per_node=num_devices)
    replanning = Replanning(members, progress, scaling, sharding, effects, make_planner=make_planner)
    going_back = GoingBack(members, progress, saving, restoring, replanning, effects)
    decider = Decider(members, progress, replanning, going_back)
    ordering = Ordering(job, progress, saving, sharding, replanning, effects)
    reconfiguration = Reconfiguration(job, members, progress, replanning, decider, ordering, effects)
    resuming = Resuming(job, saving, restoring, sharding, effects, resume=resume)
    startup = Startup(job, nodes, members, preparation, resuming, effects)
    shutdown = Shutdown(job, members, progress, saving, reconfiguration, sharding, effects)
    node_retry = NodeRetry(first_wait_s=job.control.rejoin_after_s)
    lifecycle = NodeLifecycle(
        job,
        members,
        preparation,
        progress,
        startup,
        shutdown,
        reconfiguration,
        node_retry,
        saving,
        sharding,
        effects,
        num_devices=num_devices,
        training_places=training_places,
    )
    return Parts(
        effects=effects,
        members=members,
        progress=progress,
        preparation=preparation,
        saving=saving,
        restoring=restoring,
        scaling=scaling,
        sharding=sharding,
        reconfiguration=reconfiguration,
        startup=startup,
        shutdown=shutdown,
        replica_check=ReplicaCheck(effects, degree=job.tensor_parallel),
        node_retry=node_retry,
        lifecycle=lifecycle,
        leases=Leases(job.control, members),
    )
