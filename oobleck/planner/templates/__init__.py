"""Pipeline templates: the best stages for each number of nodes."""

from __future__ import annotations

from .for_speeds import cut_for_speeds, order_for_speeds
from .lighter import lighter_templates
from .recut import MOST_STAGES, Recut
from .templates import find_templates

__all__ = ["MOST_STAGES", "Recut", "cut_for_speeds", "find_templates", "lighter_templates", "order_for_speeds"]
