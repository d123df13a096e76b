"""Draws the states of a recovery, from the table of their transitions.

python tools/recovery_states.py            print the drawing and the table, as Markdown
python tools/recovery_states.py --write    put them into docs/architecture.md, which a test compares with the code
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from oobleck.control.recovery import FENCED, TRAINED, TRANSITIONS, Transition
from oobleck.control.recovery.states import State

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
BEGIN, END = "<!-- made by tools/recovery_states.py -->\n", "<!-- end -->\n"
_GROUPS: dict[tuple[type[State], ...], str] = {TRAINED: "Trained", FENCED: "Fenced"}
"""Sets of states that are drawn as one where they have a transition in common."""


def drawing() -> str:
    """Return a flowchart in Mermaid's language; what keeps the state is left out of it."""
    lines = ["```mermaid", "flowchart TD"]
    for states, name in _GROUPS.items():
        lines += [f"    subgraph {name}", *(f"        {state.__name__}" for state in states), "    end"]
        lines += [f"    any{name}([any of {name}])"]  # Mermaid draws no arrow from a subgraph into itself
    given: dict[tuple[str, str], list[str]] = {}
    for source, row, target in _arrows():
        names = given.setdefault((source, target), [])
        names += [row.given.__name__] if row.given.__name__ not in names else []
    lines += [f"    {source} -- {', '.join(names)} --> {target}" for (source, target), names in given.items()]
    return "\n".join([*lines, "```"])


def _arrows() -> Iterator[tuple[str, Transition, str]]:
    for row in TRANSITIONS:
        sources = [f"any{_GROUPS[row.before]}"] if row.before in _GROUPS else [state.__name__ for state in row.before]
        for source in sources:
            for target in row.targets:
                yield source, row, target.__name__


def table() -> str:
    """Return all transitions, in their order."""
    lines = ["| in | on | to | because |", "|---|---|---|---|"]
    for row in TRANSITIONS:
        group = _GROUPS.get(row.before)
        sources = f"any of {group}" if group else ", ".join(state.__name__ for state in row.before)
        targets = ", ".join(target.__name__ for target in row.targets) or "the same"
        lines.append(f"| {sources} | {row.given.__name__} | {targets} | {row.why} |")
    return "\n".join(lines)


def with_states(page: str) -> str:
    """Return a page with the drawing and the table between its two marks. Raises ValueError where there are none."""
    text = f"{BEGIN}\n{drawing()}\n\n{table()}\n\n{END}"
    written, count = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: text, page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} places between {BEGIN.strip()} and {END.strip()}; it needs one")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/architecture.md")
    if parser.parse_args().write:
        PAGE.write_text(with_states(PAGE.read_text()))
    else:
        print(f"{drawing()}\n\n{table()}")


if __name__ == "__main__":
    main()
