"""The node check over SSH: a probe on each node, and the tests that it is asked for."""

from __future__ import annotations

from .check import check_nodes

__all__ = ["check_nodes"]
