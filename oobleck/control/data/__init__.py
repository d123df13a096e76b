"""Data in shards: which records each step takes, and what happens when a shard cannot be read."""

from __future__ import annotations

from .sharding import Sharding, ShardRemains

__all__ = ["ShardRemains", "Sharding"]
