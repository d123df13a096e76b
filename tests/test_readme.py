"""What README.md states, held to the code: versions, what is supported, and the numbers that any machine computes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

from oobleck.job import JobSpec
from oobleck.schedule import ScheduleKind

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SUPPORTED = " ".join(README.split("\nSupported today: ")[1].split("\n\n")[0].split())

SCHEDULES = {
    ScheduleKind.GPIPE: "GPipe",
    ScheduleKind.ONE_F_ONE_B: "1F1B",
    ScheduleKind.INTERLEAVED: "interleaved",
    ScheduleKind.ZERO_BUBBLE: "zero-bubble",
}


def test_the_versions_of_python_are_those_that_can_be_installed_on() -> None:
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    first, last = re.findall(r"Python 3\.(\d+) to 3\.(\d+)", README)[0]
    assert allowed == f">=3.{first},<3.{int(last) + 1}"


def test_the_precisions_and_schedules_are_all_that_there_are() -> None:
    dtypes = get_args(get_type_hints(JobSpec)["dtype"])
    assert set(re.findall(r"b?float\d+", SUPPORTED)) == set(dtypes)
    (listed,) = re.findall(r"schedules\]\(docs/schedules.md\) \((.*?)\)", SUPPORTED)
    assert listed.split(", ") == [SCHEDULES[kind] for kind in ScheduleKind]
    assert "not run" not in SUPPORTED
