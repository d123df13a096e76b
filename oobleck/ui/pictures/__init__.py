"""Pictures in files: a run as an HTML page, timelines and simulated runs as SVG and as traces for Perfetto."""

from __future__ import annotations

from .bars_svg import bars_svg
from .chrome_trace import chrome_trace, run_trace
from .live_page import LIVE_HEADERS, live_page
from .report_html import report_html
from .sim_svg import outcomes_svg, sim_svg
from .timeline_svg import timeline_svg

__all__ = [
    "LIVE_HEADERS",
    "bars_svg",
    "chrome_trace",
    "live_page",
    "outcomes_svg",
    "report_html",
    "run_trace",
    "sim_svg",
    "timeline_svg",
]
