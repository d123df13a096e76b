"""Digests tell any two states apart that differ in one bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from oobleck.training.checkpoint.digests import digest_of


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
