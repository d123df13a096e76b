"""`oobleck run` with scripts whose ranks keep their processes: real kills of ranks and of whole nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.attempts_storm import Storm

MOST_REPLACED = 0.01
LONG = (pytest.mark.slow, pytest.mark.timeout(7200))


@pytest.fixture
def storm(tmp_path: Path) -> Iterator[Callable[[str, int], Storm]]:
    made = []

    def start(kind: str, seed: int) -> Storm:
        made.append(Storm(tmp_path, kind, seed=seed))
        return made[-1]

    yield start
    for each in made:
        each.ranks.close()


@pytest.mark.parametrize(
    ("kind", "kills", "nodes"),
    [
        pytest.param("ddp", 1, 0, marks=pytest.mark.slow),  # tools/bench/restart.py has one kill in every run
        pytest.param("fsdp", 2, 1, marks=pytest.mark.slow),
        *(pytest.param(kind, 200, 50, marks=LONG) for kind in ("ddp", "fsdp", "hsdp", "tp")),
        *(pytest.param(kind, 4, 2, marks=pytest.mark.slow) for kind in ("ddp", "hsdp", "tp")),
    ],
)
def test_survivors_keep_their_processes_and_every_step_has_the_undisturbed_loss(
    storm: Callable[[str, int], Storm], kind: str, kills: int, nodes: int
) -> None:
    disturbed = storm(kind, 1)
    taken = disturbed.ride(kills, nodes=nodes)
    assert disturbed.problems() == []
    replaced = sum(each.others - each.kept for each in taken)
    assert replaced <= MOST_REPLACED * sum(each.others for each in taken), taken
    runs = disturbed.ranks.entries("GenerationRuns")
    assert runs[0].num_kept == 0
    assert all(entry.num_kept for entry in runs[1:])
