"""How a run begins: once all workers are ready and the profile is known, with what a checkpoint holds, if there is one.

Until then every failure of a node ends the run, as nothing is lost by it. It ends a moment later, so that all failures
are reported together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from oobleck.control.events import EndRun, Record
from oobleck.control.journal import Loss, ProfileKnown
from oobleck.control.nodes import Membership, StartupFailures, starting_s
from oobleck.control.speed import LinkTiming
from oobleck.errors import ExitCode
from oobleck.job import MAX_KINDS, JobSpec, NodeSpec
from oobleck.planner import NodeKind, profile_to_json

from .preparation import Preparation
from .requests import Effects, LinksWanted
from .resuming import Resuming

_SETTLE_S = 1.0
"""How long other nodes' failures to start are waited for, so that all are told at once."""


class Startup:
    """Leads to the first plan, or to the end of a run that cannot begin."""

    def __init__(
        self,
        job: JobSpec,
        nodes: Sequence[NodeSpec],
        members: Membership,
        preparation: Preparation,
        link_timing: LinkTiming,
        resuming: Resuming,
    ) -> None:
        self._job = job
        self._nodes = nodes
        self._members = members
        self._preparation = preparation
        self._link_timing = link_timing
        self._resuming = resuming
        self._failures = StartupFailures(len(nodes))
        self.deadline_s = math.inf

    def forgive(self, late_s: float, soon_s: float) -> None:
        """This master was held up for `late_s`: it reads the messages of that time until `soon_s`."""
        self.deadline_s = max(self.deadline_s + late_s, soon_s)

    def expect_all(self, now_s: float) -> None:
        """Give all nodes the time that the job has for its start."""
        self.deadline_s = now_s + self._limit_s

    @property
    def _limit_s(self) -> float:
        return starting_s(self._job.control.start_timeout_s, len(self._nodes))

    def node_failed(self, node: str, loss: Loss, now_s: float) -> None:
        """A node cannot start; others may be about to say the same."""
        self._failures.note(node, loss)
        self.deadline_s = min(self.deadline_s, now_s + _SETTLE_S)

    def handle_deadline(self, now_s: float) -> tuple[EndRun, ...]:
        """End a run that cannot begin in time."""
        if now_s < self.deadline_s:
            return ()
        if self._failures:
            return (EndRun(exit_code=self._failures.exit_code, reason=str(self._failures)),)
        limit_s, missing = self._limit_s, self._preparation.waiting_for()
        return (EndRun(reason=f"not ready within {limit_s:g} s: {missing}{self._silence(now_s)}"),)

    def _silence(self, now_s: float) -> str:
        """Which nodes are silent, for an error message; during a start no node is lost by that."""
        since_s, heard_s = now_s - self._job.control.lease_s, self._members.heard_s
        silent = [node for node in self._members.living_names if heard_s[node] < since_s]
        return f"; nothing is heard of {', '.join(silent)}" if silent else ""

    def look(self, now_s: float) -> Effects:
        """Begin training once all that the first plan needs is known; ask for what is not."""
        kinds = self._preparation.kinds
        if not kinds or not self._preparation.is_complete or self._failures:
            return ()
        if len(kinds) > MAX_KINDS:
            names = ", ".join(kind.name for kind in kinds)
            text = f"the nodes are of {len(kinds)} kinds: {names}; a run may have {MAX_KINDS}: change device= or slots="
            return (EndRun(exit_code=ExitCode.CONFIG, reason=text),)
        if not self._resuming.is_known(self._members):
            return self._resuming.questions(self._members)
        network = kinds[0].profile.network
        if self._link_timing.is_needed(network):
            return (LinksWanted(network=network),)
        kinds = tuple(replace(kind, profile=self._link_timing.applied_to(kind.profile)) for kind in kinds)
        self.deadline_s = math.inf
        return (*(Record(entry=profile_known(kind, now_s)) for kind in kinds), *self._resuming.begin(kinds, now_s))


def profile_known(kind: NodeKind, now_s: float) -> ProfileKnown:
    """Return what the journal says of a kind's profile."""
    return ProfileKnown(
        t_s=now_s,
        profile_json=profile_to_json(kind.profile),
        kind=kind.name,
        num_devices=kind.devices_per_node,
    )
