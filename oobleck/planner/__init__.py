"""The planner: profiles in; templates, plans, batches and reconfigurations out.

Pure and deterministic: it knows neither torch nor trio, neither a clock nor a device.
"""

from __future__ import annotations

from .plan import ExecutionPlan, Pipeline, PipelineTemplate, Place, Stage, StageTemplate

__all__ = ["ExecutionPlan", "Pipeline", "PipelineTemplate", "Place", "Stage", "StageTemplate"]
