"""How fast links are: which of them are timed before the first plan, and what the times mean.

    looked up ── found ──────────────────────────────────────> known
        └─ not found: some pairs time theirs ── answers ─────> known, and cached
                            └─ failures alone, or none in time > assumed

A speed is cached by the kinds of the link's two ends, so that the next run on such nodes need not time it. A link that
cannot be timed keeps the speed that the profile assumes, and does not keep the run from its start.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from oobleck.control.events import LinkFound, LookUpLink, Store, Turn
from oobleck.control.journal import Measured, MeasurementBegun
from oobleck.control.nodes import Member, Membership
from oobleck.control.protocol import LinkTimed, TimeLink
from oobleck.errors import ConfigError, PeerError
from oobleck.job import JobSpec
from oobleck.planner import NetworkProfile, Profile, WorkerId, profiles

LINK_KEYS = "link-"
"""The prefix of the keys of cached links, which the keys of profiles do not have."""

# One link may be a bad one, but not the median of three.
_NUM_PAIRS = 3
# This limits a pair on any network. Two processes of one machine need 0.1 s.
_TIMEOUT_S = 5.0
_SLACK_S = 2.0
_LEAST_SIZES, _MOST_SIZES = 2, 16
# Raise it when links are timed otherwise: it is a part of the keys, so speeds that are cached by then are not used.
_MEASURES = 1

Pair = tuple[WorkerId, WorkerId]


@dataclass(slots=True)
class _Asked:
    """The link that is looked up or timed now."""

    link: str
    pairs: tuple[Pair, ...]
    key: str
    awaited: set[WorkerId] = field(default_factory=set)
    """The first workers of the pairs that have not answered."""
    speeds: list[profiles.LinkSpeed] = field(default_factory=list)
    failure: str = ""


class LinkTiming:
    """Has the `LINKS` timed one after the other."""

    def __init__(self, job: JobSpec, members: Membership) -> None:
        self._job = job
        self._members = members
        self._device_names: dict[WorkerId, str] = {}
        self._asked: _Asked | None = None
        self._known: dict[str, profiles.LinkSpeed | None] = {}
        """None for a speed that stays assumed."""
        self.deadline_s = math.inf

    def note_ready(self, worker_id: WorkerId, device_name: str) -> None:
        self._device_names[worker_id] = device_name

    def is_needed(self, network: NetworkProfile) -> bool:
        """Whether a plan should wait for the times, because the speed between nodes is unknown."""
        return "inter_node" in network.assumed and len(self._known) < len(profiles.LINKS)

    def go_on(self, turn: Turn, network: NetworkProfile) -> None:
        """Begin with the next link, once the one before is known."""
        for link in profiles.LINKS if self.is_needed(network) and self._asked is None else ():
            if link in self._known:
                continue
            if pairs := tuple(_pairs(link, self._members.living)):
                self._asked = _Asked(link, pairs, self._key(pairs[0]))
                turn.do((LookUpLink(key=self._asked.key),))
                return
            self._known[link] = None

    def take_found(self, turn: Turn, event: LinkFound) -> None:
        """Use a cached speed, or have some pairs time their links."""
        asked = self._asked
        if asked is None or asked.key != event.key:
            return
        if event.link_json is not None:
            try:
                _, speed = profiles.link_from_json(event.link_json)
            except ConfigError:
                pass  # It is torn: the link is timed again, and the cached speed overwritten.
            else:
                self._conclude(turn, asked, speed, "timed in an earlier run")
                return
        self.deadline_s = turn.now_s + _TIMEOUT_S + _SLACK_S
        asked.awaited = {leader for leader, _ in asked.pairs}
        workers = tuple(worker_id for pair in asked.pairs for worker_id in pair)
        turn.record(MeasurementBegun(t_s=turn.now_s, what=Measured.LINKS, workers=workers))
        for pair in asked.pairs:
            for index, worker_id in enumerate(pair):
                peer = self._members[pair[1 - index].node].ready[pair[1 - index].device].address
                assert peer is not None
                message = TimeLink(device=worker_id.device, peer=peer, leads=index == 0, timeout_s=_TIMEOUT_S)
                turn.send(worker_id.node, message)

    def take(self, turn: Turn, worker_id: WorkerId, message: LinkTimed) -> None:
        """Take the answer of the first worker of a pair, unless it is late. Raises PeerError."""
        seconds = _checked(message)
        asked = self._asked
        if asked is None or worker_id not in asked.awaited:
            return
        if seconds:
            asked.speeds.append(profiles.fit_link(seconds))
        else:
            asked.failure = message.error
        asked.awaited.discard(worker_id)
        if not asked.awaited:
            self._decide(turn, asked)

    def handle_deadline(self, turn: Turn) -> bool:
        """Stop waiting for missing answers; returns whether any were missing."""
        if turn.now_s < self.deadline_s or self._asked is None:
            return False
        if self._asked.awaited:
            self._asked.failure = f"{min(self._asked.awaited)} has not answered within {_TIMEOUT_S + _SLACK_S:g} s"
        self._decide(turn, self._asked)
        return True

    def applied_to(self, profile: Profile) -> Profile:
        """Replace the speeds that a profile assumes by the known ones."""
        network = profile.network
        for link, speed in self._known.items():
            if speed is not None:
                network = network.with_link(link, speed)
        return replace(profile, network=network)

    def _decide(self, turn: Turn, asked: _Asked) -> None:
        if not asked.speeds:
            self._conclude(turn, asked, None, asked.failure)
            return
        speed = profiles.median_link(asked.speeds)
        turn.do((Store(key=asked.key, value_json=profiles.link_to_json(asked.link, speed)),))
        pairs = ", ".join(f"{one} and {other}" for one, other in asked.pairs)
        self._conclude(turn, asked, speed, f"timed between {pairs}")

    def _conclude(self, turn: Turn, asked: _Asked, speed: profiles.LinkSpeed | None, how: str) -> None:
        self._known[asked.link] = speed
        self._asked, self.deadline_s = None, math.inf
        where = profiles.LINKS_IN_WORDS[asked.link]
        if speed is None:
            turn.note("warning", f"the speed of links {where} stays assumed; they could not be timed: {how}")
        else:
            turn.note("info", f"links {where}: {speed} ({how})")

    def _key(self, pair: Pair) -> str:
        """Return the key of a link's two ends: equal keys mean that a cached speed may be used."""
        one, other = (self._members[worker_id.node] for worker_id in pair)
        depends_on = [
            self._job.device,
            sorted(self._device_names.get(worker_id, "") for worker_id in pair),
            "one node" if one is other else "one machine" if one.machine == other.machine else "two machines",
            max(self._members.machines.sharing_device(each.spec.name) for each in (one, other)) > 1,
            _MEASURES,
        ]
        return f"{LINK_KEYS}{hashlib.blake2s(json.dumps(depends_on).encode(), digest_size=8).hexdigest()}"


def _pairs(link: str, members: Sequence[Member]) -> Iterator[Pair]:
    """Yield a few pairs of workers with such a link between them, which do not disturb each other."""
    ready = [
        (member, devices)
        for member in members
        if (devices := [device for device, worker in sorted(member.ready.items()) if worker.address is not None])
    ]
    if link == "intra_node":
        with_two = [(member, devices) for member, devices in ready if len(devices) > 1]
        for member, devices in _one_for_each_machine(with_two)[:_NUM_PAIRS]:
            yield WorkerId(node=member.spec.name, device=devices[0]), WorkerId(node=member.spec.name, device=devices[1])
        return
    apart = _one_for_each_machine(ready)
    if len(apart) == 1:
        apart = ready[:2]  # All nodes are on one machine.
    ends = [WorkerId(node=member.spec.name, device=devices[0]) for member, devices in apart[: 2 * _NUM_PAIRS]]
    yield from zip(ends[::2], ends[1::2], strict=False)


def _one_for_each_machine(members: Sequence[tuple[Member, list[int]]]) -> list[tuple[Member, list[int]]]:
    # A dict keeps the last of equal keys, and the first node of each machine is wanted.
    return list({member.machine: (member, devices) for member, devices in reversed(members)}.values())[::-1]


def _checked(message: LinkTimed) -> dict[int, float]:
    """Return the seconds by size; empty if the answer is an error. Raises PeerError for nonsense."""
    seconds = dict(message.seconds)
    if message.error and not seconds:
        return {}
    is_sound = all(size > 0 and 0 < time_s < _TIMEOUT_S for size, time_s in seconds.items())
    if message.error or not is_sound or not _LEAST_SIZES <= len(seconds) <= _MOST_SIZES:
        raise PeerError(f"timed a link at {message.seconds}; it must be some sizes, and seconds for each")
    return seconds
