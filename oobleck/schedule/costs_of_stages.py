"""Turns a profile into the costs of a planned pipeline's stages: the planner's costs become a timeline's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oobleck.planner import PipelineTemplate, Profile, StageTemplate
from oobleck.planner.costs import chunks_footprint, closing_s, cut_seconds, stage_footprint
from oobleck.planner.profiles import stage_more_s

from .cost import StageCost


def stage_costs(
    profile: Profile | Sequence[Profile], template: PipelineTemplate, *, reduce_s: float = 0.0, splits: bool = False
) -> tuple[StageCost, ...]:
    """Return the costs of each stage of a template, or of each chunk; `reduce_s` is the same for all stages.

    `profile` is one for all nodes, or one for each node of the pipeline. With `splits`, stages after the first run the
    backward pass in two parts, at measured costs if the profile has them, or else half of the whole pass in each part.
    """
    stages = template.stages
    profiles = profiles_of_stages(profile, template)
    costs = []
    for index, (stage, profile) in enumerate(zip(stages, profiles, strict=True)):
        layers = [profile.layers[layer] for layer in stage.layers]
        held = stage_footprint(profile, stage)
        is_first_chunk = index < template.num_stages  # costs that a stage has only once count for its first chunk
        static_bytes = chunks_footprint(profile, template.chunks_of(index)).static_bytes if is_first_chunk else 0
        parts = [layer.split for layer in layers if layer.split is not None]
        # Parts were measured with one device to a stage.
        is_split = splits and index > 0 and stage.num_devices == 1 and len(parts) == len(layers)
        if is_split:
            forward_s = math.fsum(part.forward_s for part in parts)
            backward_s = math.fsum(part.backward_input_s + part.backward_weight_s for part in parts)
        else:
            forward_s = math.fsum(layer.forward_s[stage.num_devices] for layer in layers)
            backward_s = math.fsum(layer.backward_s[stage.num_devices] for layer in layers)
            backward_s += stage_more_s(profile, stage)
        costs.append(
            StageCost(
                forward_s=forward_s,
                backward_s=backward_s,
                backward_weight_s=math.fsum(part.backward_weight_s for part in parts) if is_split else None,
                weight_activation_bytes=sum(part.kept_bytes for part in parts) if is_split else None,
                send_forward_s=_send_s(profile, stages, index, index + 1),
                send_backward_s=_send_s(profile, stages, index, index - 1),
                reduce_s=reduce_s + closing_s(profile, template.chunks_of(index)) if is_first_chunk else 0.0,
                activation_bytes=held.activation_bytes,
                static_bytes=static_bytes,
            )
        )
    return tuple(costs)


def profiles_of_stages(profile: Profile | Sequence[Profile], template: PipelineTemplate) -> tuple[Profile, ...]:
    """Return the profile of each stage's node, or of each chunk's."""
    if isinstance(profile, Profile):
        return (profile,) * len(template.stages)
    return tuple(profile[stage.node_index] for stage in template.stages)


def _send_s(profile: Profile, stages: Sequence[StageTemplate], source: int, target: int) -> float:
    """Return the seconds of a message between neighbours; gradients are as large as hidden states."""
    if not 0 <= target < len(stages):
        return 0.0
    layer = profile.layers[stages[min(source, target)].stop_layer - 1]
    same_node = stages[source].node_index == stages[target].node_index
    return cut_seconds(profile.network, layer.output_bytes, same_node=same_node)
