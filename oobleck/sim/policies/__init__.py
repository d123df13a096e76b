"""Models of other systems on a trace, each with its source and its simplifications.

They know nothing of the coordinator. All share `ledger` (accounts), `happenings` (the trace as present and absent
nodes) and `throughput` (the speed of a number of nodes).
"""

from __future__ import annotations

from .registry import POLICIES, PolicySettings

__all__ = ["POLICIES", "PolicySettings"]
