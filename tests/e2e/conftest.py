from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .elastic import Reference, each_loss, elastic_run
from .harness import Outcome, Runner
from .node_processes import Nodes


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = Runner(tmp_path_factory.mktemp("e2e"))
    yield runner
    runner.close()


@pytest.fixture(autouse=True)
def _no_checkpoints_of_other_tests(runner: Runner) -> None:
    """All runs have one tag: what another test has saved, often of another model, is not this one's to go on from."""
    runner.forget_checkpoints()


@pytest.fixture(scope="session")
def undisturbed(runner: Runner) -> Outcome:
    """The GPT-2 job in float64, with no failure: what every other run is compared with."""
    outcome = runner.run("--job", str(runner.job_file()))
    assert outcome.exit_code == 0, outcome.output
    return outcome


@pytest.fixture(scope="session")
def endless_reference(runner: Runner) -> Reference:
    """The losses of the GPT-2 job when it goes on for ever."""
    return each_loss(runner.job_file(), runner.directory / "cache")


@pytest.fixture
def nodes(runner: Runner, tmp_path: Path) -> Iterator[Nodes]:
    """Nodes that dial in; none is left."""
    nodes = Nodes(runner, tmp_path)
    yield nodes
    nodes.close()


@pytest.fixture
def start(runner: Runner, endless_reference: Reference) -> Callable[..., Any]:
    """Starts a run that must be right in the end."""
    return partial(elastic_run, runner, endless_reference)
