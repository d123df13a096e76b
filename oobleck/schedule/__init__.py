"""Schedules: the work of each stage of a pipeline in one step, in order.

A schedule is compiled once, proven sound, and executed unchanged. This package knows the order of the work and its
costs; it knows no tensors, processes, clock or network.
"""

from __future__ import annotations

from oobleck.plan import ScheduleKind

# `choice`, `forecast` and `interleaving` are no names of this package: they load the planner's cost model, and numpy.
from .check import check_schedule
from .compile import SECTIONED_KINDS, compile_schedule, section_stops
from .cost import StageCost
from .instruction import Instruction, Op, Program
from .schedule import Link, Schedule, ScheduleError, Wire, peak_in_flight
from .text import format_program, format_schedule, parse_program, parse_schedule
from .timeline import Span, Timeline, Transfer, timeline

__all__ = [
    "SECTIONED_KINDS",
    "Instruction",
    "Link",
    "Op",
    "Program",
    "Schedule",
    "ScheduleError",
    "ScheduleKind",
    "Span",
    "StageCost",
    "Timeline",
    "Transfer",
    "Wire",
    "check_schedule",
    "compile_schedule",
    "format_program",
    "format_schedule",
    "parse_program",
    "parse_schedule",
    "peak_in_flight",
    "section_stops",
    "timeline",
]
