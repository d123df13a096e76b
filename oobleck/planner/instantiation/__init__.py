"""Instantiation: the number of pipelines of each size, and the microbatches of each."""

from __future__ import annotations

from .batches import distribute_microbatches
from .sizes import SizeOption, Sizing, bytes_reduction_s, choose_sizes, possible_numbers, reduction_s, sizing_of

__all__ = [
    "SizeOption",
    "Sizing",
    "bytes_reduction_s",
    "choose_sizes",
    "distribute_microbatches",
    "possible_numbers",
    "reduction_s",
    "sizing_of",
]
