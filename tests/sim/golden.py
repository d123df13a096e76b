"""Golden traces: the shrunk trace of each bug that the simulator found, with what it was played on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from oobleck.job import ScalingSpec
from oobleck.sim.trace import Trace, trace_from_json, trace_to_json
from tests.sim.virtual import Setting

__all__ = ["DIRECTORY", "GoldenTrace", "read_golden", "write_golden"]

DIRECTORY = Path(__file__).parents[1] / "traces"


@dataclass(frozen=True, kw_only=True)
class GoldenTrace:
    """A trace that broke a promise once."""

    found: str
    """What went wrong, and why."""
    trace: Trace
    setting: Setting
    seed: int


def read_golden(path: Path) -> GoldenTrace:
    document = json.loads(path.read_text())
    return GoldenTrace(
        found=document["found"],
        trace=trace_from_json(json.dumps(document["trace"]), source=path.name),
        setting=_setting(**document["setting"]),
        seed=document["seed"],
    )


def _setting(*, scaling: dict[str, Any] | None = None, **given: Any) -> Setting:
    return Setting(**given) if scaling is None else Setting(scaling=ScalingSpec(**scaling), **given)


def write_golden(name: str, golden: GoldenTrace) -> None:
    """Write one down, with what of its setting is not as usual."""
    usual = Setting()
    setting = {
        part.name: asdict(value) if is_dataclass(value) else value
        for part in fields(Setting)
        if (value := getattr(golden.setting, part.name)) != getattr(usual, part.name)
    }
    document = {
        "found": golden.found,
        "setting": setting,
        "seed": golden.seed,
        "trace": json.loads(trace_to_json(golden.trace)),
    }
    (DIRECTORY / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
