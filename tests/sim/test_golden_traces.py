"""Every trace that ever broke a promise is played again, and breaks none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.golden import DIRECTORY, read_golden
from tests.sim.test_promises import play


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("*.json")), ids=lambda path: path.stem)
def test_a_bug_once_fixed_stays_fixed(path: Path):
    golden = read_golden(path)
    play(golden.trace, golden.setting, golden.seed)
