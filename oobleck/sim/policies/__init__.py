"""What other systems make of a trace: models of them, each with its source and its simplifications.

They know nothing of the coordinator. What all have in common is in `ledger` (accounts) and `happenings` (the trace,
as a system sees it that only knows nodes that are there, or not); how fast so many nodes are is in `throughput`.
"""

from __future__ import annotations

from .registry import POLICIES, PolicySettings

__all__ = ["POLICIES", "PolicySettings"]
