from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.training.data.sampling import permuted, samples_of_step


@given(st.integers(0, 2**40), st.integers(0, 1000), st.integers(1, 700))
def test_an_epoch_is_a_permutation(seed: int, epoch: int, num_samples: int):
    assert sorted(permuted(seed, epoch, range(num_samples), num_samples)) == list(range(num_samples))


@given(st.integers(0, 100), st.integers(1, 40), st.integers(1, 300), st.integers(1, 4))
def test_each_sample_is_taken_exactly_once_an_epoch(seed: int, batch_size: int, num_samples: int, num_epochs: int):
    num_steps = -(-num_samples * num_epochs // batch_size)
    taken = [i for step in range(1, num_steps + 1) for i in samples_of_step(seed, step, batch_size, num_samples)]
    assert len(taken) == num_steps * batch_size
    for epoch in range(num_epochs):
        assert sorted(taken[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))


def test_steps_seeds_and_epochs_take_different_samples():
    draws = {samples_of_step(seed, step, 16, 17_000) for seed in range(3) for step in (1, 2, 2000)}
    assert len(draws) == 9
    assert permuted(0, 0, range(50), 50) != permuted(0, 1, range(50), 50)


def test_an_order_is_not_the_storage_order():
    """Neighbouring positions fall apart: a shuffled order of n samples has about two fixed neighbour pairs."""
    order = permuted(3, 0, range(5000), 5000)
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 15


def test_samples_are_spread_evenly_over_positions():
    """Mean index of the first tenth of the positions, over many seeds, is the middle."""
    means = [sum(permuted(seed, 0, range(100), 1000)) / 100 for seed in range(200)]
    # The mean of 100 draws without replacement has a deviation of 27; of 200 such means, of 1.9.
    assert sum(means) / len(means) == pytest.approx(499.5, abs=10)


def test_another_process_takes_the_same_samples_and_needs_no_torch():
    code = (
        "import sys; from oobleck.training.data.sampling import samples_of_step; "
        "print(samples_of_step(5, 7, 9, 1000)); sys.exit('torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(samples_of_step(5, 7, 9, 1000))
