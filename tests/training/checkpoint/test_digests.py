"""Digests tell any two states apart that differ in one bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Launches(TorchDispatchMode):
    """Counts operations that compute or copy, each of which is a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_sum_takes_two_kernels_for_4_million_words_and_a_few_for_all() -> None:
    """Launching them was most of the time on an H200: 35 GB/s with nine of them."""
    words = torch.empty(9 << 22, device="meta")
    sum_of_words(words)  # draws the odd numbers
    with _Launches() as launches:
        sum_of_words(words)
    assert launches.count <= 2 * 9 + 8


def test_the_state_on_a_gpu_does_not_leave_it() -> None:
    """The meta device has no values: whatever copied one to the host, or asked for it, would raise."""
    total = sum_of_words(torch.empty(5 << 20, device="meta"))
    assert total.device.type == "meta"
    with pytest.raises(RuntimeError):
        total.item()
