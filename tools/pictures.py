"""Draw the pictures of README.md from the journal of a run: its dashboard as a node is lost, and its first recovery.

    python tools/pictures.py                                        from docs/images/demo.jsonl
    python tools/pictures.py ~/.oobleck/gpt2-demo/journal.jsonl     from another run, such as `make demo`'s

The journal is kept beside the pictures, up to the moment that they show, so that anyone draws the same ones. If its
format changes, or a run should look otherwise, run `make demo`, and name its journal.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, it finds its neighbours

from rich.console import Console

from oobleck.control.journal import JournalEntry, NodeState, ProfileKnown, RunView
from oobleck.errors import UserError
from oobleck.runtime.journals import read_journal
from oobleck.ui.dashboard import Dashboard
from oobleck.wire import encode_json
from tools.recovery_timeline import Recovery, find_recovery, recovery_svg

__all__ = ["animated_svg", "dashboard_svg", "excerpt", "main", "pictures"]

IMAGES = Path(__file__).parents[1] / "docs" / "images"
KEPT = IMAGES / "demo.jsonl"

_TERMINAL = "terminal"
_COMMAND = "oobleck up --local 4 --kill node2@40"
_WIDTH, _HEIGHT = 92, 26
_SHOWN_AFTER_S = 1.0
"""The dashboard is drawn so long after the recovery."""
_MOMENT_S = 1.2
"""For so long the animation shows each moment, the last one for three times as long; the run's own clock is in it."""
_WEB_FONT = re.compile(r"@font-face \{[^}]*\}\s*")
"""rich has the picture load its font from a server; the reader's own will do."""


def pictures(entries: Sequence[JournalEntry]) -> dict[str, str]:
    """The pictures by their file names, as SVG. Raises UserError for a run that lost no node."""
    recovery = find_recovery(entries)
    if recovery is None:
        raise UserError("no node was lost in this run; `make demo` kills one")
    return {
        "dashboard.svg": animated_svg([dashboard_svg(entries, at_s=at_s) for at_s in _moments(recovery)]),
        "recovery.svg": recovery_svg(recovery),
    }


def _moments(recovery: Recovery) -> list[float]:
    """The seconds of the run that the animation shows: of each step around the recovery, and of what it consists of."""
    last_s = recovery.done.t_s + _SHOWN_AFTER_S
    told = {recovery.done.began_s, recovery.ordered_s, recovery.done.t_s, *(step.t_s for step in recovery.steps)}
    return [*sorted(at_s for at_s in told if at_s < last_s), last_s]


def animated_svg(moments: Sequence[str]) -> str:
    """One picture that shows others of the same size in turn, for ever; the last alone where motion is not wanted."""
    num_parts = len(moments) + 2  # the last one stays
    rules = [
        ".moment{visibility:hidden;animation:%.1fs step-end infinite}" % (num_parts * _MOMENT_S),
        "@media (prefers-reduced-motion:reduce){.moment{animation:none}.moment:last-of-type{visibility:visible}}",
    ]
    groups = []
    for number, moment in enumerate(moments):
        is_last = number == len(moments) - 1
        starts, ends = (100 * part / num_parts for part in (number, num_parts if is_last else number + 1))
        rules.append(
            f"@keyframes moment{number}{{0%{{visibility:{'hidden' if number else 'visible'}}}"
            f"{starts:.2f}%{{visibility:visible}}{ends:.2f}%{{visibility:hidden}}}}"
        )
        # The names of rich's styles and clip paths are of one picture, and these share a document.
        inside = moment.replace(_TERMINAL, f"{_TERMINAL}-{number}")
        groups.append(f'<g class="moment" style="animation-name:moment{number}">\n{inside}</g>\n')
    head, _ = moments[-1].split(">", 1)
    return f"{head}>\n<style>\n{chr(10).join(rules)}\n</style>\n{''.join(groups)}</svg>\n"


def dashboard_svg(entries: Sequence[JournalEntry], *, at_s: float) -> str:
    """The dashboard as it is `at_s` seconds after the start of the run, in a terminal window."""
    view = RunView()
    for entry in entries:
        if entry.t_s <= at_s:
            view.apply(entry)
    for node in view.at(at_s).nodes:
        if node.state is NodeState.TRAINING:
            view.heard(node.name, at_s)  # heartbeats are no journal entries
    console = Console(
        record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor", width=_WIDTH, height=_HEIGHT
    )
    console.print(Dashboard(view.at(at_s), fill=False))
    return _WEB_FONT.sub("", console.export_svg(title=_COMMAND, unique_id=_TERMINAL))


def excerpt(entries: Sequence[JournalEntry]) -> list[JournalEntry]:
    """What the pictures need of a journal: all up to the last step that they show, without the profile."""
    recovery = find_recovery(entries)
    assert recovery is not None, "pictures() was drawn before"
    last_s = max(recovery.done.t_s + _SHOWN_AFTER_S, *(step.t_s for step in recovery.steps))
    return [entry for entry in entries if entry.t_s <= last_s and not isinstance(entry, ProfileKnown)]


def main() -> int:
    """Read the command line, draw; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "journal", type=Path, nargs="?", help="journal.jsonl of a run; by default, the one that is kept"
    )
    parser.add_argument("--output", type=Path, default=IMAGES, help="directory of the pictures")
    given = parser.parse_args()
    try:
        entries = tuple(read_journal(given.journal or KEPT))
        drawn = pictures(entries)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    if given.journal is not None:
        (given.output / KEPT.name).write_bytes(b"".join(map(encode_json, excerpt(entries))))
    for name, svg in drawn.items():
        (given.output / name).write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
