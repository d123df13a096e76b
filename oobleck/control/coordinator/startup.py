"""How a run begins: once all workers are ready and the profile is known, with what a checkpoint holds, if there is one.

Until then every failure of a node ends the run, as nothing is lost by it: all are waited for a moment, and told at
once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from oobleck.control.checkpoints import Candidate
from oobleck.control.events import Effects, RunOver
from oobleck.control.journal import Loss, ProfileKnown
from oobleck.control.membership import Membership, StartupFailures
from oobleck.exit_codes import ExitCode
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import Profile, WorkerId, profile_to_json

from .preparation import Preparation
from .resuming import Resuming

__all__ = ["Ready", "Startup"]

_SETTLE_S = 1.0
"""How long other nodes' failures to start are waited for, so that all are told at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """All that the first plan needs."""

    profile: Profile
    candidate: Candidate | None
    """The checkpoint that the run begins from; None for the model's initial values."""


class Startup:
    """Mutable: leads to the first plan, or to the end of a run that cannot begin."""

    def __init__(
        self,
        job: JobSpec,
        nodes: Sequence[NodeSpec],
        members: Membership,
        preparation: Preparation,
        resuming: Resuming,
        effects: Effects,
    ) -> None:
        self._job = job
        self._nodes = nodes
        self._members = members
        self._preparation = preparation
        self._resuming = resuming
        self._effects = effects
        self._failures = StartupFailures(len(nodes))
        self.deadline_s = math.inf

    def forgive(self, late_s: float, soon_s: float) -> None:
        """This master was held up for `late_s`: what was said meanwhile waits to be read until `soon_s`."""
        self.deadline_s = max(self.deadline_s + late_s, soon_s)

    def expect_all(self) -> None:
        """Give all nodes the time that the job has for its start."""
        self.deadline_s = self._effects.now_s + self._job.control.start_timeout_s

    def node_failed(self, node: str, loss: Loss) -> None:
        """A node cannot start; others may be about to say the same."""
        self._failures.note(node, loss)
        self.deadline_s = min(self.deadline_s, self._effects.now_s + _SETTLE_S)

    def worker_lost(self, worker_id: WorkerId) -> None:
        """A worker has ended, and is started again: what it was asked, another one is, or it itself."""
        self._effects.command(*self._preparation.worker_lost(worker_id))
        self._resuming.forget()

    def handle_deadline(self) -> None:
        """Raise RunOver: the run cannot begin."""
        if self._failures:
            raise RunOver(self._failures.exit_code, str(self._failures))
        limit_s = self._job.control.start_timeout_s
        raise RunOver(
            ExitCode.FAILED, f"not ready within {limit_s:g} s: {self._preparation.waiting_for()}{self._silence()}"
        )

    def _silence(self) -> str:
        """Who has fallen silent, for an error message; during a start nobody is lost by it."""
        since_s = self._effects.now_s - self._job.control.lease_s
        silent = [member.spec.name for member in self._members.living if member.last_heard_s < since_s]
        return f"; nothing is heard of {', '.join(silent)}" if silent else ""

    def take_ready(self) -> Ready | None:
        """Return what the first plan is made of, once everything that it needs is known. Raises RunOver."""
        profile = self._preparation.profile
        if profile is None or not self._preparation.is_complete or self._failures:
            return None
        self._check_devices()
        if not self._resuming.is_known(self._members):
            return None
        self._effects.record(ProfileKnown(t_s=self._effects.now_s, profile_json=profile_to_json(profile)))
        ready = Ready(profile=profile, candidate=self._resuming.begin(profile))
        self.deadline_s = math.inf
        return ready

    def _check_devices(self) -> None:
        if len({spec.num_devices for spec in self._nodes}) > 1:
            counts = ", ".join(f"{spec.name} has {spec.num_devices}" for spec in self._nodes)
            raise RunOver(
                ExitCode.CONFIG,
                f"all nodes need the same number of devices: {counts}; change slots= or devices=",
            )
