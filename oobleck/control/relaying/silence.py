"""When a relay that is silent is left: by its agents, and by the master for them."""

from __future__ import annotations

PATIENCE = 0.4
"""A relay that is silent for this share of a lease is left: its children are heard directly before a lease lapses."""
