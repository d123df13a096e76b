"""What a plan gives one worker to do, and with whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oobleck.planner import ExecutionPlan, Place

from .groups import GroupKey

__all__ = ["PlaceInPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInPlan:
    """What a plan gives one worker to do."""

    pipeline: int
    layers: range
    stage: int
    num_stages: int
    lane_key: GroupKey
    """The group that links the pipeline's stages."""
    stage_key: GroupKey
    """The group of the devices that share the stage."""

    @classmethod
    def find(cls, plan: ExecutionPlan, place: Place, pipeline_generations: Sequence[int]) -> PlaceInPlan | None:
        """None for a spare."""
        located = plan.locate(place)
        if located is None:
            return None
        pipeline = plan.pipelines[located[0]]
        return cls(
            pipeline=located[0],
            layers=pipeline.stages[located[1]].layers,
            stage=located[1],
            num_stages=len(pipeline.stages),
            lane_key=GroupKey("pipeline", pipeline_generations[located[0]], pipeline.places),
            stage_key=GroupKey("stage", pipeline_generations[located[0]], pipeline.stages[located[1]].places),
        )
