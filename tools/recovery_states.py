"""Draws the states of a recovery, from the table of their transitions.

python tools/recovery_states.py            print the drawing and the table, as Markdown
python tools/recovery_states.py --write    put them into docs/architecture.md, which a test compares with the code
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from oobleck.control.recovery import FENCED, TRAINED, TRANSITIONS, Transition, always
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
    for row in TRANSITIONS:
        if row.target is None:
            continue
        for source in _sources(row, "any{}"):
            names = given.setdefault((source, row.target.__name__), [])
            names += [kind.__name__ for kind in row.inputs if kind.__name__ not in names]
    lines += [f"    {source} -- {', '.join(names)} --> {target}" for (source, target), names in given.items()]
    return "\n".join([*lines, "```"])


def _sources(row: Transition, group: str) -> list[str]:
    """The names of the states that a row begins in, a whole group by its own."""
    whole = {group.format(name): states for states, name in _GROUPS.items() if set(states) <= set(row.sources)}
    grouped = {state for states in whole.values() for state in states}
    return [*whole, *(state.__name__ for state in row.sources if state not in grouped)]


def table() -> str:
    """Return all transitions, in their order."""
    lines = ["| in | on | if | to | because |", "|---|---|---|---|---|"]
    for row in TRANSITIONS:
        guard = "" if row.guard is always else row.guard.__name__.replace("_", " ")
        target = row.target.__name__ if row.target else "the same"
        given = ", ".join(kind.__name__ for kind in row.inputs)
        lines.append(f"| {', '.join(_sources(row, 'any of {}'))} | {given} | {guard} | {target} | {row.why} |")
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
