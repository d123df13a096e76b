"""Pipeline templates: the best stages for each number of nodes."""

from __future__ import annotations

from .templates import find_templates

__all__ = ["find_templates"]
