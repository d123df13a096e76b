"""The planner: profiles in; templates, plans, batches and reconfigurations out.

Pure and deterministic: it knows neither torch nor trio, neither a clock nor a device. The values (plans, profiles,
decisions) need the standard library alone; `Planner` imports numpy, so this package loads it on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oobleck.plan import ExecutionPlan, LayerTransfer, Pipeline, PipelineTemplate, Stage, StageTemplate, WorkerId

from .profiles import (
    KNOWN_DEVICES,
    KNOWN_MODELS,
    MAX_LOGITS,
    DeviceProfile,
    DeviceSheet,
    LayerProfile,
    ModelShape,
    NetworkProfile,
    Profile,
    SplitBackward,
    device_sheet,
    device_sheet_from_json,
    estimate_profile,
    model_shape,
    profile_from_json,
    profile_to_json,
    shape_from_config,
    sheet_of_product,
    with_speed,
)
from .values import Cutter, Decision, NodeKind, PlannerSettings, with_shared_links

if TYPE_CHECKING:
    from .planner import Planner

__all__ = [
    "KNOWN_DEVICES",
    "KNOWN_MODELS",
    "MAX_LOGITS",
    "Cutter",
    "Decision",
    "DeviceProfile",
    "DeviceSheet",
    "ExecutionPlan",
    "LayerProfile",
    "LayerTransfer",
    "ModelShape",
    "NetworkProfile",
    "NodeKind",
    "Pipeline",
    "PipelineTemplate",
    "Planner",
    "PlannerSettings",
    "Profile",
    "SplitBackward",
    "Stage",
    "StageTemplate",
    "WorkerId",
    "device_sheet",
    "device_sheet_from_json",
    "estimate_profile",
    "model_shape",
    "profile_from_json",
    "profile_to_json",
    "shape_from_config",
    "sheet_of_product",
    "with_shared_links",
    "with_speed",
]


def __getattr__(name: str) -> object:
    if name == "Planner":
        from .planner import Planner

        return Planner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
