"""What deploy/ has for Prometheus and Grafana, and what a run serves them, for tests that compare the two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from oobleck.control.journal import Metrics, prometheus_text

DEPLOY = Path(__file__).parents[1] / "deploy"


def whole_text() -> str:
    """What a run serves all of whose values are known."""
    known = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "step_time_s": 1.0, "tokens_per_s": 1.0, "mfu": 0.5}
    return prometheus_text(replace(Metrics().sample(1.0), **known), "mine")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DEPLOY / "grafana" / "oobleck.json").read_text())
    return read
