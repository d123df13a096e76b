"""How fast nodes compute and links are, and when a slow node is tried again."""

from __future__ import annotations

from .correction import corrected
from .link_timing import LINK_KEYS, LinkTiming
from .slow_node_retry import SlowNodeRetry
from .speed_tracker import REPORTS_NEEDED, PaceMeter, SpeedTracker, found_out_s, is_split, microbatch_s

__all__ = [
    "LINK_KEYS",
    "REPORTS_NEEDED",
    "LinkTiming",
    "PaceMeter",
    "SlowNodeRetry",
    "SpeedTracker",
    "corrected",
    "found_out_s",
    "is_split",
    "microbatch_s",
]
