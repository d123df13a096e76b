"""All journal entries: everything that the master sees and decides, in order.

`t_s` counts seconds since the run started, on the master's clock.
"""

from __future__ import annotations

from .node_entries import NodeEntry
from .plan_entries import PlanEntry
from .rank_entries import RankEntry
from .run_entries import RunEntry
from .step_entries import StepEntry

JournalEntry = RunEntry | NodeEntry | PlanEntry | StepEntry | RankEntry
