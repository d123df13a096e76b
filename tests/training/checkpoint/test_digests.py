"""Digests tell any two states apart that differ in one bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oobleck.training.checkpoint.digests import digest_of, sum_of_words
from tests.examples import examples


@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    size=st.integers(1, 50),
    data=st.data(),
)
def test_one_flipped_bit_changes_the_digest(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    state = [torch.arange(size, dtype=dtype), torch.tensor(2.0, dtype=dtype), torch.empty(0, dtype=dtype)]
    before = digest_of(state)
    assert digest_of([tensor.clone() for tensor in state]) == before
    raw = state[0].view(torch.uint8)
    position, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
    raw[position] ^= 1 << bit
    assert digest_of(state) != before


@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8]),
    size=st.sampled_from([1, 50, (1 << 14) - 1, 1 << 14, (1 << 14) + 3, (1 << 22) + 5]),
    data=st.data(),
)
@examples(40)
def test_one_flipped_bit_changes_the_sum_that_a_gpu_takes(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """Of the CPU's tensors here: the sum is of integers, and the same on any device."""
    state = torch.arange(size).to(dtype)
    before = sum_of_words(state)
    raw = state.view(torch.uint8)
    position, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
    raw[position] ^= 1 << bit
    assert sum_of_words(state) != before
    raw[position] ^= 1 << bit
    assert sum_of_words(state.clone()) == before


def test_words_that_change_places_change_the_sum() -> None:
    state = torch.arange(1 << 15, dtype=torch.float32)
    assert sum_of_words(state) != sum_of_words(state.flip(0))
    assert sum_of_words(state) != sum_of_words(torch.roll(state, 1 << 14)), "whole rows of them"


def test_the_state_on_a_gpu_does_not_leave_it() -> None:
    """The meta device has no values: whatever copied one to the host, or asked for it, would raise."""
    total = sum_of_words(torch.empty(5 << 20, device="meta"))
    assert total.device.type == "meta"
    with pytest.raises(RuntimeError):
        total.item()
