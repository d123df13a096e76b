"""Functions of a notebook's cells, in IPython itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oobleck.host.script import Job, run_script
from oobleck.job import ScriptSpec

SHELL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
*cells, last = json.load(sys.stdin)
for cell in cells:
    shell.run_cell(cell, store_history=True).raise_error()
print("\\nTEXT", json.dumps(shell.run_cell(last, store_history=True).result))
"""
IMPORTS = """
from oobleck import Job
from oobleck.cli.launch.script_text import script_text
from oobleck.errors import ConfigError
"""
LAYERS = """
def decorated(function):
    return function

@decorated
def layers():
    rows = [Block().area() for _ in 'ab']
    xml.etree.ElementTree.Element(NAME)
    return NAME, os.path.join('a', 'b'), fold(lambda left, right: left + right, rows), len(rows)
"""
GIVE = """
try:
    given = script_text({job})
except ConfigError as error:
    given = str(error)
given
"""


def given(directory: Path, *cells: str, job: str) -> Any:
    """What `script_text` gives for a job in a notebook of these cells."""
    done = subprocess.run(
        [sys.executable, "-c", SHELL],
        input=json.dumps([IMPORTS, *cells, GIVE.format(job=job)]),
        cwd=directory,
        env={"PATH": "/usr/bin:/bin", "HOME": str(directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.rsplit("\nTEXT ", 1)[1])


def again(text: str) -> Job:
    return run_script(ScriptSpec(name="job.py", source=text, directory="/nowhere"))


def test_a_function_takes_all_that_it_needs_along(tmp_path: Path):
    cells = (
        "import math as m, os.path\nimport xml.etree.ElementTree\nfrom functools import reduce as fold",
        "SIZES = {'a': [1, 2], 'b': (None, 0.5)}",
        "NAME = 'first'\nclass Base:\n    size = SIZES['a']",
        "class Block(Base):\n    def area(self):\n        return m.prod(self.size)",
        LAYERS,
        "NAME = 'second'",
        "%%time\nunused = open('/dev/null')",
    )
    text, arguments = given(tmp_path, *cells, job="Job(model=layers, max_steps=3)")
    job = again(text)
    assert arguments == []
    assert job.made["model"]() == ("second", "a/b", 4, 2)
    assert job.settings["max_steps"] == 3
    assert "unused" not in text


def test_what_lives_in_the_notebook_alone_is_named(tmp_path: Path):
    cells = ("rows = open('/dev/null')", "def read():\n    return rows.read()", "def samples():\n    return read()")
    assert given(tmp_path, *cells, job="Job(data=samples)").startswith(
        "read uses rows, a TextIOWrapper that lives in this notebook alone; make it in the function, or put all of it "
        "into a file with `%%writefile job.py`"
    )


@pytest.mark.parametrize("body", ["lambda: []", "type('Made', (), {})"])
def test_what_has_no_definition_in_a_cell_is_refused(tmp_path: Path, body: str):
    assert "so workers cannot find it" in given(tmp_path, f"layers = {body}", job="Job(model=layers)")


def test_a_function_that_returns_the_job_brings_its_lambdas(tmp_path: Path):
    cells = ("def layers(): return 4", "def make():\n    return Job(model=layers, lr_lambda=lambda step: step / 2)")
    text, _ = given(tmp_path, *cells, job="make")
    assert (again(text).made["model"](), again(text).made["lr_lambda"](3)) == (4, 1.5)


@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_a_number_without_a_literal_is_refused(tmp_path: Path, number: str):
    cells = (f"limit = float('{number}')", "def layers(): return limit")
    assert "layers uses limit, a float that lives in this notebook alone" in given(
        tmp_path, *cells, job="Job(model=layers)"
    )
