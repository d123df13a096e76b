"""The node check over SSH: a probe on each node runs the tests."""

from __future__ import annotations

from .check import check_nodes

__all__ = ["check_nodes"]
