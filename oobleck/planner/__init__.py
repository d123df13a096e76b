"""The planner: profiles in; templates, plans, batches and reconfigurations out.

Pure and deterministic: it knows neither torch nor trio, neither a clock nor a device. The values (plans,
profiles, decisions) need the standard library alone; `Planner` brings numpy along, so it is loaded when first
asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .decision import Decision
from .plan import ExecutionPlan, Pipeline, PipelineTemplate, Place, Stage, StageTemplate
from .profile import DeviceProfile, LayerProfile, NetworkProfile, Profile, profile_from_json, profile_to_json
from .settings import PlannerSettings
from .transfers import LayerTransfer

if TYPE_CHECKING:
    from .planner import Planner

__all__ = [
    "Decision",
    "DeviceProfile",
    "ExecutionPlan",
    "LayerProfile",
    "LayerTransfer",
    "NetworkProfile",
    "Pipeline",
    "PipelineTemplate",
    "Place",
    "Planner",
    "PlannerSettings",
    "Profile",
    "Stage",
    "StageTemplate",
    "profile_from_json",
    "profile_to_json",
]


def __getattr__(name: str) -> object:
    if name == "Planner":
        from .planner import Planner

        return Planner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
