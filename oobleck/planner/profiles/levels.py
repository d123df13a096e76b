"""What a profile says of layers that recompute some or all of what their backward pass needs."""

from __future__ import annotations

import math

from oobleck.plan import StageTemplate

from .profile import LayerProfile, Profile


def activation_bytes(layer: LayerProfile, level: str) -> int:
    """Return what a layer keeps of a microbatch at a level; layers that are no blocks keep the same at all."""
    return layer.recomputed[level].activation_bytes if level in layer.recomputed else layer.activation_bytes


def transient_bytes(layer: LayerProfile, level: str) -> int:
    """Return what a pass of a layer takes at a level."""
    return layer.recomputed[level].transient_bytes if level in layer.recomputed else layer.transient_bytes


def more_s(layer: LayerProfile, level: str, num_devices: int) -> float:
    """Return by how many seconds a layer's passes take longer at a level than if they recomputed nothing."""
    return layer.recomputed[level].more_s[num_devices] if level in layer.recomputed else 0.0


def stage_more_s(profile: Profile, stage: StageTemplate) -> float:
    """Return by how many seconds a stage takes longer, as it recomputes."""
    return math.fsum(more_s(layer, level, stage.num_devices) for layer, level in levels_of(profile, stage))


def levels_of(profile: Profile, stage: StageTemplate) -> list[tuple[LayerProfile, str]]:
    """Return a stage's layers with their levels; `none` for layers that are no blocks."""
    levels = stage.levels([layer for layer in stage.layers if profile.layers[layer].recomputed])
    return [(profile.layers[layer], levels.get(layer, "none")) for layer in stage.layers]
