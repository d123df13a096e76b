"""The tree of agents, for the master: who speaks to it through whom, and what is said through it."""

from __future__ import annotations

from .desk import RelayDesk
from .mail import RelayMail
from .tree import RelayTree

__all__ = ["RelayDesk", "RelayMail", "RelayTree"]
