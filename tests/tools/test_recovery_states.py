"""The drawing of a recovery's states in docs/architecture.md is that of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_architecture_page_draws_the_states_that_the_code_has():
    command = [sys.executable, str(ROOT / "tools" / "recovery_states.py")]
    drawn = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert drawn in page, "run `python tools/recovery_states.py --write`"
