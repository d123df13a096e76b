"""The values that describe a job, and the bounds of every number in it; each value checks itself when it is made."""

from __future__ import annotations

from .node_spec import DEFAULT_KIND, NodeSpec, check_kind_name
from .spec import (
    MAX_CHUNKS,
    MAX_DEVICES,
    MAX_KINDS,
    MAX_MICROBATCHES,
    MAX_NODES,
    MAX_STEPS,
    CheckpointSpec,
    ControlSpec,
    DataSpec,
    JobSpec,
    LoraSpec,
    LossCounting,
    ModelSpec,
    OptimizerSpec,
    Scalar,
    ScalingSpec,
    ScheduleName,
    ScriptSpec,
    Task,
    check_model_numbers,
)

__all__ = [
    "DEFAULT_KIND",
    "MAX_CHUNKS",
    "MAX_DEVICES",
    "MAX_KINDS",
    "MAX_MICROBATCHES",
    "MAX_NODES",
    "MAX_STEPS",
    "CheckpointSpec",
    "ControlSpec",
    "DataSpec",
    "JobSpec",
    "LoraSpec",
    "LossCounting",
    "ModelSpec",
    "NodeSpec",
    "OptimizerSpec",
    "Scalar",
    "ScalingSpec",
    "ScheduleName",
    "ScriptSpec",
    "Task",
    "check_kind_name",
    "check_model_numbers",
]
