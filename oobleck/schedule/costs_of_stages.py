"""What each stage of a planned pipeline costs, from a profile: where the planner's costs become a timeline's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from oobleck.planner import LayerProfile, PipelineTemplate, Profile, StageTemplate
from oobleck.planner.costs import chunks_footprint, cut_seconds, footprint

from .cost import StageCost


class _Passes(TypedDict):
    """Some of a `StageCost`."""

    forward_s: float
    backward_s: float
    backward_weight_s: NotRequired[float]
    weight_activation_bytes: NotRequired[int]


def stage_costs(
    profile: Profile | Sequence[Profile], template: PipelineTemplate, *, reduce_s: float = 0.0, splits: bool = False
) -> tuple[StageCost, ...]:
    """Say what each stage of a template costs, or each chunk; `reduce_s` is the same for all stages.

    `profile` may be one for each node of the pipeline, where these are of several kinds.

    These are the planner's own costs, in parts: its seconds of a stage are forward, backward and both sends. With
    `splits`, stages after the first take the backward pass in two parts, at the costs that the profile has measured
    for that; where it has none, at those of the whole pass, half in each part.
    """
    stages = template.stages
    profiles = profiles_of_stages(profile, template)
    costs = []
    for index, (stage, profile) in enumerate(zip(stages, profiles, strict=True)):
        layers = [profile.layers[layer] for layer in stage.layers]
        held = footprint(profile, stage.first_layer, stage.stop_layer, num_devices=stage.num_devices)
        is_first_chunk = index < template.num_stages  # what a stage has but once is counted with it
        static_bytes = chunks_footprint(profile, template.chunks_of(index)).static_bytes if is_first_chunk else 0
        costs.append(
            StageCost(
                **_passes(layers, stage.num_devices, splits=splits and index > 0),
                send_forward_s=_send_s(profile, stages, index, index + 1),
                send_backward_s=_send_s(profile, stages, index, index - 1),
                reduce_s=reduce_s if is_first_chunk else 0.0,
                activation_bytes=held.activation_bytes,
                static_bytes=static_bytes,
            )
        )
    return tuple(costs)


def profiles_of_stages(profile: Profile | Sequence[Profile], template: PipelineTemplate) -> tuple[Profile, ...]:
    """Return the profile of each stage's node, or each chunk's, from one for all nodes or one for each."""
    if isinstance(profile, Profile):
        return (profile,) * len(template.stages)
    return tuple(profile[stage.node_index] for stage in template.stages)


def _send_s(profile: Profile, stages: Sequence[StageTemplate], source: int, target: int) -> float:
    """Seconds of a message between neighbours: hidden states one way, as many bytes of gradients the other."""
    if not 0 <= target < len(stages):
        return 0.0
    layer = profile.layers[stages[min(source, target)].stop_layer - 1]
    same_node = stages[source].node_index == stages[target].node_index
    return cut_seconds(profile.network, layer.output_bytes, same_node=same_node)


def _passes(layers: Sequence[LayerProfile], num_devices: int, *, splits: bool) -> _Passes:
    """What the forward and the backward pass of a stage take."""
    parts = [layer.split for layer in layers if layer.split is not None]
    if not splits or num_devices != 1 or len(parts) < len(layers):
        return {
            "forward_s": math.fsum(layer.forward_s[num_devices] for layer in layers),
            "backward_s": math.fsum(layer.backward_s[num_devices] for layer in layers),
        }
    return {
        "forward_s": math.fsum(part.forward_s for part in parts),
        "backward_s": math.fsum(part.backward_input_s + part.backward_weight_s for part in parts),
        "backward_weight_s": math.fsum(part.backward_weight_s for part in parts),
        "weight_activation_bytes": sum(part.kept_bytes for part in parts),
    }
