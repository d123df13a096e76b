"""One profile from those that the workers of a machine have measured at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from .profile import LayerProfile, Profile, Recomputed


def typical_profile(profiles: Sequence[Profile]) -> Profile:
    """Return a profile with the median of all times, and the least memory that any device has; O(layers).

    All profiles are of the same model and kind of device.
    """
    first = profiles[0]
    alike = zip(*(profile.layers for profile in profiles), strict=True)
    memory_bytes = min(profile.device.memory_bytes for profile in profiles)
    return replace(
        first,
        layers=tuple(_typical_layer(layers) for layers in alike),
        device=replace(first.device, memory_bytes=memory_bytes),
    )


def _typical_layer(layers: Sequence[LayerProfile]) -> LayerProfile:
    first = layers[0]
    splits = [layer.split for layer in layers if layer.split is not None]
    return replace(
        first,
        forward_s=_medians([layer.forward_s for layer in layers]),
        backward_s=_medians([layer.backward_s for layer in layers]),
        update_s=median(layer.update_s for layer in layers),
        split=replace(
            splits[0],
            forward_s=median(split.forward_s for split in splits),
            backward_input_s=median(split.backward_input_s for split in splits),
            backward_weight_s=median(split.backward_weight_s for split in splits),
        )
        if splits
        else None,
        recomputed={level: _typical_level(layer.recomputed[level] for layer in layers) for level in first.recomputed},
    )


def _typical_level(levels: Iterable[Recomputed]) -> Recomputed:
    first, *others = levels
    return replace(first, more_s=_medians([first.more_s, *(other.more_s for other in others)]))


def _medians(times: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the median for each number of devices."""
    return {devices: median(each[devices] for each in times) for devices in times[0]}
