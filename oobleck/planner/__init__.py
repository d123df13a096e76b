"""The planner: profiles in; templates, plans, batches and reconfigurations out.

Pure and deterministic: it knows neither torch nor trio, neither a clock nor a device.
"""

from __future__ import annotations

from .decision import Decision
from .plan import ExecutionPlan, Pipeline, PipelineTemplate, Place, Stage, StageTemplate
from .planner import Planner
from .profile import DeviceProfile, LayerProfile, NetworkProfile, Profile, profile_from_json, profile_to_json
from .settings import PlannerSettings
from .transfers import LayerTransfer

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
