"""What has happened to the nodes of a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from oobleck.plan import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a plan is reconfigured for; see `Planner.reconfigure`."""

    lost: Collection[str]
    joined: Collection[str]
    leaving: Collection[str]
    resting: Collection[str]
    speeds: Mapping[str, float]
    """0.5 for a node that takes twice as long as in the profile; 1.0 for those not named."""
    held: Mapping[WorkerId, frozenset[int]] | None
