"""The profile of each kind of node: found in the cache, or measured by a worker of that kind.

    wanted ── a worker is ready ──> looked up ── found ──────────────> known
                                        └── measured by a worker ──────^
                                              └── it is lost: another one, or the next that is ready

It returns commands, and knows nothing of plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from oobleck.control.events import Command, LookUpProfile, ProfileFound, Send, StoreProfile
from oobleck.control.nodes import Member, Membership
from oobleck.control.protocol import Profiled, ProfileRequest
from oobleck.errors import ConfigError, PeerError
from oobleck.planner import NodeKind, Profile, WorkerId, profile_from_json


@dataclass(slots=True)
class _Wanted:
    """Where a kind's profile is to come from."""

    key: str
    num_devices: int
    measures: WorkerId | None = None
    """The worker that was asked to measure it."""
    is_unmeasured: bool = False
    """It was lost, and no other one was there to be asked."""
    workers: set[WorkerId] = field(default_factory=set)
    """Who can be asked."""


class KindProfiles:
    """Says whom to ask, until each kind's profile is known."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._wanted: dict[str, _Wanted] = {}
        self.known: dict[str, NodeKind] = {}
        """In the order in which they became known."""

    def restore(self, kinds: tuple[NodeKind, ...]) -> None:
        """Continue with the profiles that an earlier master knew."""
        self.known = {kind.name: kind for kind in kinds}

    def keep_only(self, kinds: tuple[NodeKind, ...]) -> None:
        """Forget the profiles of other kinds, for nothing can be planned with them."""
        for name in self.known.keys() - {kind.name for kind in kinds}:
            del self.known[name], self._wanted[name]

    def note_ready(self, member: Member, worker_id: WorkerId, key_of: Callable[[], str]) -> tuple[Command, ...]:
        """A worker is ready; `key_of` returns the key of the profile which it would measure.

        The first of a kind settles it: of thousands no other one is asked for its key.
        """
        kind = member.spec.kind
        if kind in self.known:
            return ()
        if (wanted := self._wanted.get(kind)) is None:
            key = key_of()
            self._wanted[kind] = _Wanted(key=key, num_devices=member.spec.num_devices, workers={worker_id})
            return (LookUpProfile(key=key, kind=kind),)
        wanted.workers.add(worker_id)
        return self._ask(wanted, worker_id) if wanted.is_unmeasured else ()

    def take_found(self, event: ProfileFound) -> tuple[Command, ...]:
        """Use a cached profile, or have a worker measure one."""
        wanted = self._wanted[event.kind]
        if event.profile_json is not None:
            try:
                self._know(event.kind, profile_from_json(event.profile_json, source=f"cached profile {wanted.key}"))
            except ConfigError:
                pass  # torn or of an older version: measured again, and overwritten
            else:
                return ()
        return self._have_measured(event.kind)

    def take_measured(self, member: Member, message: Profiled) -> tuple[Command, ...]:
        """Use a measured profile, and have it cached. Raises PeerError for one that nobody asked for."""
        kind = member.spec.kind
        wanted = self._wanted.get(kind)
        if wanted is None or kind in self.known:
            raise PeerError("sent a profile that nobody asked for")
        self._know(kind, profile_from_json(message.profile_json, source="measured profile"))
        wanted.measures = None
        return (StoreProfile(key=wanted.key, profile_json=message.profile_json),)

    def worker_lost(self, worker_id: WorkerId) -> tuple[Command, ...]:
        """A worker has ended, and is started again: have another one measure what it was to."""
        kind = self._members[worker_id.node].spec.kind
        wanted = self._wanted.get(kind)
        if wanted is None or kind in self.known:
            return ()
        wanted.workers.discard(worker_id)
        if wanted.measures is None or wanted.measures.node != worker_id.node:
            return ()
        return self._have_measured(kind)

    def node_lost(self, node: str) -> tuple[Command, ...]:
        """A node is gone: have another one measure what it was to."""
        lost: tuple[Command, ...] = ()
        for worker_id in self._members[node].worker_ids:
            lost = self.worker_lost(worker_id) or lost
        return lost

    def ask_again(self, node: str) -> tuple[Command, ...]:
        """Repeat what was asked of a node, whose agent may not have heard it."""
        asked = [(each, each.measures) for each in self._wanted.values() if each.measures is not None]
        return tuple(command for each, who in asked if who.node == node for command in self._ask(each, who))

    def _know(self, kind: str, profile: Profile) -> None:
        self.known[kind] = NodeKind(name=kind, profile=profile, devices_per_node=self._wanted[kind].num_devices)

    def _have_measured(self, kind: str) -> tuple[Command, ...]:
        """Ask any worker that is ready, or else the first that is."""
        wanted = self._wanted[kind]
        living = {member.spec.name for member in self._members.living if member.spec.kind == kind}
        there = [worker_id for worker_id in sorted(wanted.workers) if worker_id.node in living]
        wanted.is_unmeasured = not there
        wanted.measures = None
        return self._ask(wanted, there[0]) if there else ()

    def _ask(self, wanted: _Wanted, worker_id: WorkerId) -> tuple[Command, ...]:
        wanted.measures, wanted.is_unmeasured = worker_id, False
        return (Send(node=worker_id.node, message=ProfileRequest(device=worker_id.device)),)
