"""Before training: nodes come up, workers get ready, and the model's profile becomes known.

It returns commands, and says whether preparation is complete.
"""

from __future__ import annotations

from oobleck import __version__
from oobleck.control.events import Command, LookUpProfile, ProfileFound, Send, StoreProfile
from oobleck.control.membership import Member, Membership, MemberState
from oobleck.control.protocol import (
    PROTOCOL_VERSION,
    Configure,
    Hello,
    Profiled,
    ProfileRequest,
    StartWorker,
    WorkerReady,
)
from oobleck.errors import ConfigError, PeerError
from oobleck.job import JobSpec
from oobleck.planner import Profile, WorkerId, profile_from_json

from .profile_key import profile_key

__all__ = ["Preparation", "misfit_of"]


class Preparation:
    """Says what to ask of nodes until every worker is ready and the profile is known."""

    def __init__(self, job: JobSpec, members: Membership, *, python_version: str, run: str) -> None:
        self._job = job
        self._run = run
        self._members = members
        self._python_version = python_version
        self._key: str | None = None
        self._measures: WorkerId | None = None
        """The worker that was asked to measure the profile."""
        self._is_unmeasured = False
        """It was lost, and no other one was there to be asked."""
        self.profile: Profile | None = None

    def restore(self, profile: Profile) -> None:
        """Continue with the profile that an earlier master knew."""
        self.profile = profile

    def misfit(self, hello: Hello) -> str | None:
        """Why an agent's environment does not fit ours; None when it does."""
        return misfit_of(hello, python_version=self._python_version)

    def configure(self, node: str) -> tuple[Command, ...]:
        """Tell a node's agent about the job and have its workers started."""
        member = self._members[node]
        asks = self._ask(self._measures) if self._measures is not None and self._measures.node == node else ()
        configure = Configure(
            protocol=PROTOCOL_VERSION,
            oobleck_version=__version__,
            job=self._job,
            node=node,
            devices=member.spec.devices,
            address=member.address,
            torch_threads=self._threads(member),
            device_memory_bytes=self._memory(member),
            num_sharing=self._members.sharing_device(member),
            run=self._run,
        )
        starts = [Send(node=node, message=StartWorker(device=worker_id.device)) for worker_id in member.worker_ids]
        return (Send(node=node, message=configure), *starts, *asks)

    def note_ready(self, member: Member, message: WorkerReady) -> tuple[Command, ...]:
        """Look at a worker that is ready. The first one of all settles which profile is needed.

        Raises ConfigError when it trains on other data than the rest, or from other weights.
        """
        other = self._members.first_ready_worker  # all others have its digest
        if other is not None and other.data_digest != message.data_digest:
            raise ConfigError(
                f"{member.spec.name} and {other.node} would train on different text (digests "
                f"{message.data_digest} and {other.data_digest}); give all nodes the same files"
            )
        if other is not None and other.weights_digest != message.weights_digest:
            raise ConfigError(
                f"{member.spec.name} and {other.node} would start from different weights; give model.path the same "
                "files on all nodes"
            )
        if self._is_unmeasured:
            return self._ask(WorkerId(node=member.spec.name, device=message.device))
        if self.profile is not None or self._key is not None:
            return ()
        assert member.hello is not None
        self._key = profile_key(
            self._job,
            layer_names=message.layer_names,
            parameters=message.parameters,
            device=(
                message.device_name,
                message.device_memory_bytes or self._memory(member),
                self._threads(member),
                member.hello.num_cores,
            ),
            versions=(member.hello.python_version, message.torch_version),
        )
        return (LookUpProfile(key=self._key),)

    def take_profile(self, event: ProfileFound) -> tuple[Command, ...]:
        """Use the cached profile, or have the first worker that is ready measure one."""
        if event.profile_json is not None:
            try:
                self.profile = profile_from_json(event.profile_json, source=f"cached profile {self._key}")
            except ConfigError:
                pass  # torn or of an older version: measured again, and overwritten
            else:
                return ()
        return self._have_measured()

    def worker_lost(self, worker_id: WorkerId) -> tuple[Command, ...]:
        """A worker has ended, and is started again: have another one measure what it was to."""
        if self.profile is not None or self._measures is None or self._measures.node != worker_id.node:
            return ()
        return self._have_measured()

    def _have_measured(self) -> tuple[Command, ...]:
        """Ask any worker that is ready, or else the first that is."""
        member = next((member for member in self._members.living if member.ready), None)
        self._is_unmeasured = member is None
        return () if member is None else self._ask(WorkerId(node=member.spec.name, device=min(member.ready)))

    def _ask(self, worker_id: WorkerId) -> tuple[Command, ...]:
        self._measures, self._is_unmeasured = worker_id, False
        return (Send(node=worker_id.node, message=ProfileRequest(device=worker_id.device)),)

    def take_measurement(self, message: Profiled) -> tuple[Command, ...]:
        """Use a measured profile, and have it cached. Raises PeerError for one that nobody asked for."""
        if self._key is None or self.profile is not None:
            raise PeerError("sent a profile that nobody asked for")
        self._measures = None
        self.profile = profile_from_json(message.profile_json, source="measured profile")
        return (StoreProfile(key=self._key, profile_json=message.profile_json),)

    @property
    def is_complete(self) -> bool:
        """All nodes that were asked for are ready, and the profile is known."""
        return self.profile is not None and self._members.are_all_ready

    def waiting_for(self) -> str:
        """What is missing, for an error message."""
        slow = self._members.in_state(MemberState.CONNECTING, MemberState.CONNECTED)
        if slow:
            return ", ".join(f"{member.spec.name} ({member.state})" for member in slow)
        return "the model's profile"

    def _threads(self, member: Member) -> int:
        assert member.hello is not None
        if self._job.torch_threads is not None:
            return self._job.torch_threads
        return max(1, member.hello.num_cores // self._members.sharing_host(member))

    def _memory(self, member: Member) -> int:
        assert member.hello is not None
        if self._job.device_memory_bytes is not None:
            return self._job.device_memory_bytes
        return member.hello.memory_bytes // self._members.sharing_host(member)


def misfit_of(hello: Hello, *, python_version: str) -> str | None:
    """Why an agent's environment does not fit ours, in words that say what to change; None when it does."""
    if hello.oobleck_version != __version__ or hello.protocol != PROTOCOL_VERSION:
        return (
            f"oobleck {hello.oobleck_version} (protocol {hello.protocol}) runs there, {__version__} (protocol "
            f"{PROTOCOL_VERSION}) here; install the same version on both"
        )
    if _minor(hello.python_version) != _minor(python_version):
        return (
            f"Python {hello.python_version} runs there, {python_version} here; "
            "use the same minor version on both (the job's `python` names the interpreter)"
        )
    return None


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
