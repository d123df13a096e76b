"""The tree of agents, for the master: which agent speaks to it through which, and the messages on that way."""

from __future__ import annotations

from .desk import RelayDesk

__all__ = ["RelayDesk"]
