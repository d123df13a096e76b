"""What `make` installs is held by constraints.txt, for all that pyproject.toml asks for and on any machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LINES = [
    line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line and line[0] != "#"
]


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["test"])]


def test_each_line_holds_one_package_to_a_version_that_any_index_has():
    assert [line for line in LINES if not re.fullmatch(r"[\w.-]+==\d[\w.]*(\.\*)?( ; .+)?", line)] == []
    names = [canonicalize_name(Requirement(line).name) for line in LINES]
    assert len(set(names)) == len(names)


def test_all_that_the_project_asks_for_is_held_within_what_it_asks_for():
    held = {canonicalize_name(Requirement(line).name): line.split("==")[1] for line in LINES}
    assert [each.name for each in wanted() if canonicalize_name(each.name) not in held] == []
    for each in wanted():
        version = held[canonicalize_name(each.name)].replace(".*", ".0")
        assert each.specifier.contains(version), f"{each} leaves {version} out"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_installs_by_the_constraints_and_again_once_they_change():
    command = ["make", "--dry-run", "--what-if=constraints.txt", ".venv/.installed"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--constraint constraints.txt" in said
