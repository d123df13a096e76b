from __future__ import annotations

import doctest
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_examples_of_the_documentation_run_as_they_stand():
    # A fence right after an example would be taken for its output, so the page leaves a line between.
    result = doctest.testfile(str(DOCS / "schedules.md"), module_relative=False, encoding="utf-8")
    assert result.attempted >= 10
    assert result.failed == 0
