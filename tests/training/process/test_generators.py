"""Processes that are forked from one draw other numbers, as processes do that have started by themselves."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from oobleck.training.process.generators import LIBRARIES, generator_states, reseed_generators

DRAWS = {
    "random": random.random,
    "numpy": np.random.random,
    "torch": lambda: torch.rand(1, dtype=torch.float64).item(),
}


@pytest.fixture(autouse=True)
def _states_are_kept() -> object:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def test_each_library_of_the_table_draws_other_numbers_once_it_is_reseeded() -> None:
    assert DRAWS.keys() == LIBRARIES, "each row has its test"
    seen = {name: set() for name in DRAWS}
    for _ in range(3):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        same = {name: draw() for name, draw in DRAWS.items()}
        reseed_generators()
        for name, draw in DRAWS.items():
            seen[name] |= {same[name], draw()}
    assert {name: len(draws) for name, draws in seen.items()} == dict.fromkeys(DRAWS, 4)


def test_torch_has_a_seed_of_its_own_as_in_a_process_that_seeds_nothing() -> None:
    reseed_generators()
    first = torch.initial_seed()
    reseed_generators()
    assert torch.initial_seed() != first


@pytest.mark.parametrize(
    ("name", "seed"), [("random", random.seed), ("numpy.random", np.random.seed), ("torch", torch.manual_seed)]
)
def test_a_generator_that_was_seeded_is_seen_to_be(name: str, seed: object) -> None:
    seed(3)
    before = generator_states()
    seed(4)
    after = generator_states()
    assert [each for each in before if before[each] != after[each]] == [name]
