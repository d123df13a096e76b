from __future__ import annotations

from collections.abc import Iterator

import pytest

from .harness import Outcome, Runner


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = Runner(tmp_path_factory.mktemp("e2e"))
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def undisturbed(runner: Runner) -> Outcome:
    """The GPT-2 job in float64, with no failure: what every other run is compared with."""
    outcome = runner.run("--job", str(runner.job_file()))
    assert outcome.exit_code == 0, outcome.output
    return outcome
