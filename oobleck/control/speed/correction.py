"""Profiles corrected by what steps take: passes of a run that computes are longer or shorter than when measured.

A worker's reports tell how many times its stage's seconds it takes. The median over a kind's nodes is what the profile
was wrong by; layers are not told apart, because a report is of a stage. Backward passes in two parts are corrected
apart, where stages run both ways: what the split costs is what zero-bubble pipelines are chosen by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from oobleck.planner import NodeKind, Profile, with_speed

CLOSE = 0.1
"""A profile that is off by no more than this share stays as it is."""


def corrected(
    kinds: Sequence[NodeKind], usual: Mapping[tuple[str, bool], float], kind_of: Mapping[str, str]
) -> tuple[NodeKind, ...]:
    """Return the kinds with the profiles that their nodes' times show; those that are close stay the same objects.

    `usual` is as `SpeedTracker.usual` returns it, and `kind_of` names each node's kind.
    """
    return tuple(
        _corrected(
            kind,
            plain=[times for (node, is_split), times in usual.items() if kind_of[node] == kind.name and not is_split],
            split=[times for (node, is_split), times in usual.items() if kind_of[node] == kind.name and is_split],
        )
        for kind in kinds
    )


def _corrected(kind: NodeKind, *, plain: Sequence[float], split: Sequence[float]) -> NodeKind:
    if not plain and not split:
        return kind
    # Where no node runs one of the two ways, it is taken to be off by as much as the other.
    whole = median(plain or split)
    parts = median(split or plain)
    if max(abs(whole - 1), abs(parts - 1)) <= CLOSE:
        return kind
    slower, of_parts = with_speed(kind.profile, 1 / whole), with_speed(kind.profile, 1 / parts)
    return replace(kind, profile=_with_parts_of(slower, of_parts))


def _with_parts_of(profile: Profile, other: Profile) -> Profile:
    """Return a profile with another one's backward passes in two parts."""
    pairs = zip(profile.layers, other.layers, strict=True)
    return replace(profile, layers=tuple(replace(own, split=its.split) for own, its in pairs))
