"""Which classes of transformers train equal to the uncut model, and which are refused: docs/models.md.

    python tools/models.py [--output docs/models.md] [--only REGEX] [--jobs 2] [--limit 300]

Every class of transformers' auto mappings is built in a tiny configuration, cut into one, two and three stages by the
project's own machinery, and trained for three steps in this process; losses and weights must be those of the uncut
model. A class that cannot be cut is kept whole, and trained beside the same model in plain torch; what cannot be
trained at all must be refused by name within a second. Classes run in child processes, one after the other, so that one
that crashes or hangs ends nothing but its own row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, it finds its neighbours

__all__ = ["HEADS", "Case", "Row", "cases", "page", "run"]

HEADS: Mapping[str, str] = {
    "causal language model": "CAUSAL_LM",
    "masked language model": "MASKED_LM",
    "sequence to sequence": "SEQ_TO_SEQ_CAUSAL_LM",
    "sequence classification": "SEQUENCE_CLASSIFICATION",
    "token classification": "TOKEN_CLASSIFICATION",
    "question answering": "QUESTION_ANSWERING",
    "multiple choice": "MULTIPLE_CHOICE",
    "image and text to text": "IMAGE_TEXT_TO_TEXT",
    "speech to text": "SPEECH_SEQ_2_SEQ",
    "speech, CTC": "CTC",
    "audio classification": "AUDIO_CLASSIFICATION",
    "image classification": "IMAGE_CLASSIFICATION",
}
"""Kinds of heads, and what transformers calls their mappings from types to classes."""

EQUAL, WHOLE, REFUSED, UNTRIED, FAULT = "equal", "whole", "refused", "not tried", "fault"
_PER_PROCESS = 40
"""Classes that a child tries before another takes its place, so that memory is given back."""
_STARTS_S = 120.0
"""How much longer a child's first class may take."""
_COMMAND = (sys.executable, __file__, "--child")


@dataclass(frozen=True, slots=True)
class Case:
    """One class to be tried."""

    head: str
    model_type: str
    class_name: str


@dataclass(frozen=True, slots=True)
class Row:
    """What was found of it."""

    case: Case
    outcome: str
    note: str = ""
    seconds: float = 0.0
    """Until it was refused."""


def main() -> int:
    """Try what the arguments say and write the page; returns how many faults there are, up to 100."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the page to write; without it, to stdout")
    parser.add_argument("--only", default="", help="a regular expression that a class's name has to match")
    parser.add_argument("--jobs", type=int, default=2, help="child processes at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one class")
    parser.add_argument("--rows", type=Path, help="a file that keeps what was found, so that a sweep can be continued")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return _child()
    wanted = [case for case in cases() if re.search(arguments.only, case.class_name)]
    rows = list(run(wanted, jobs=arguments.jobs, limit_s=arguments.limit, kept=arguments.rows))
    text = page(rows, date=datetime.now(UTC).date().isoformat())
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        arguments.output.write_text(text)
    return min(100, sum(row.outcome == FAULT for row in rows))


def cases() -> tuple[Case, ...]:
    """Return all classes of the mappings, each under the first head that names it."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Case] = {}
    for head, mapping in HEADS.items():
        for model_type, names in sorted(getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items()):
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, Case(head, model_type, name))
    return tuple(found.values())


# --- in child processes ----------------------------------------------------------------------------------------


def run(
    wanted: Iterable[Case],
    *,
    jobs: int,
    limit_s: float,
    starts_s: float = _STARTS_S,
    kept: Path | None = None,
    command: Sequence[str] = _COMMAND,
) -> Iterator[Row]:
    """Try classes in child processes; yields a row for each, in their order.

    `limit_s` is for one class, and `starts_s` what a child may take besides for its first. `kept` has rows of an
    earlier call, which are not tried again. `command` is what a child runs.
    """
    wanted = list(wanted)
    known = _read(kept)
    # Classes of a type follow each other, so that its modules are imported once.
    missing = sorted((case for case in wanted if case not in known), key=lambda case: case.model_type)
    batches = [missing[first : first + _PER_PROCESS] for first in range(0, len(missing), _PER_PROCESS)]

    def note(row: Row) -> None:
        known[row.case] = row
        sys.stderr.write(f"{row.outcome:10} {row.case.class_name} {row.note[:120]}\n")
        if kept is not None:
            with kept.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def start() -> _Child:
        return _Child(command, starts_s)

    with ThreadPoolExecutor(jobs) as pool:
        for rows in pool.map(lambda batch: list(_try_batch(batch, start, limit_s, note)), batches):
            del rows
    yield from (known[case] for case in wanted)


def _try_batch(
    batch: Sequence[Case], start: Callable[[], _Child], limit_s: float, note: Callable[[Row], None]
) -> Iterator[Row]:
    """Try classes in one child after the other: one that ends or takes too long is replaced for the next class."""
    left = list(batch)
    while left:
        with start() as child:
            while left:
                case = left.pop(0)
                row = child.ask(case, limit_s)
                note(row)
                yield row
                if not child.lives:
                    break


class _Child:
    """A process that tries one class after the other."""

    def __init__(self, command: Sequence[str], starts_s: float) -> None:
        self._starts_s = starts_s
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        self.lives = True
        self._has_answered = False

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, case: Case, limit_s: float) -> Row:
        """Have a class tried."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        limit_s += 0.0 if self._has_answered else self._starts_s
        try:
            process.stdin.write(json.dumps(asdict(case)) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            self.lives = False
            return Row(case, FAULT, "the process had ended")
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(limit_s) else None
        self._has_answered = True
        if line:
            return _row(json.loads(line))
        self.lives = False
        if line is None:
            return Row(case, FAULT, f"nothing for {limit_s:g} s")
        return Row(case, FAULT, f"the process ended with {process.wait()}")


def _child() -> int:
    """Try what comes on stdin, one class a line, and print what is found."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tools.model_trial import try_class

    for line in sys.stdin:
        case = Case(**json.loads(line))
        outcome, note, seconds = try_class(case.model_type, case.class_name)
        answers.write(json.dumps(asdict(Row(case, outcome, note, seconds))) + "\n")
        answers.flush()
    return 0


def _row(values: dict[str, Any]) -> Row:
    return Row(**{**values, "case": Case(**values["case"])})


def _read(kept: Path | None) -> dict[Case, Row]:
    if kept is None or not kept.exists():
        return {}
    rows = [_row(json.loads(line)) for line in kept.read_text().splitlines()]
    return {row.case: row for row in rows}


# --- the page --------------------------------------------------------------------------------------------------

_INTRODUCTION = """\
# Models

Every class of transformers' auto mappings was built in a tiny configuration, cut into one, two and three stages, and
trained for three steps. A class is *equal* if all losses and weights are those of the uncut model (within 1e-5 in
float32); classes that are no chain of blocks are cut [as they are traced](trainer.md#models-with-a-loss-of-their-own).
It is *whole* if it cannot be cut, for the reason below, and is equal where it is [kept
whole](trainer.md#models-that-are-kept-whole) on each node; it is *refused* if an error names the class and the reason
before anything is launched. It is *not tried* if its tiny configuration does not run in plain transformers either, with
made-up tokens, pixels or sound, or needs a package that is not installed. This command writes the page:

```bash
.venv/bin/python tools/models.py --output docs/models.md
```

with transformers {version}, on {date}. [Training](training.md) covers your own classes, heads, hooks and buffers.
"""


def page(rows: Sequence[Row], *, date: str) -> str:
    """Return the page of the documentation; `date` is that of the sweep."""
    import transformers

    parts = [_INTRODUCTION.format(version=transformers.__version__, date=date), _summary(rows)]
    for head, group in groupby(rows, key=lambda row: row.case.head):
        parts.append(_section(head, list(group)))
    return "\n".join(parts)


def _summary(rows: Sequence[Row]) -> str:
    outcomes = [EQUAL, WHOLE, REFUSED, UNTRIED, *([FAULT] if any(row.outcome == FAULT for row in rows) else [])]
    lines = [f"| head | {' | '.join(outcomes)} |", f"|---|{'---:|' * len(outcomes)}"]
    for head in HEADS:
        counts = Counter(row.outcome for row in rows if row.case.head == head)
        if counts:
            lines.append(f"| {head} | {' | '.join(str(counts[each]) for each in outcomes)} |")
    return "\n".join(lines) + "\n"


def _section(head: str, rows: Sequence[Row]) -> str:
    lines = [f"## {head[0].upper()}{head[1:]}", ""]
    equal = [row.case.class_name for row in rows if row.outcome == EQUAL]
    if equal:
        lines += [f"Equal: {', '.join(equal)}.", ""]
    others = sorted((row for row in rows if row.outcome != EQUAL), key=lambda row: (row.outcome, _reason(row)))
    if others:
        lines += ["| | why | classes |", "|---|---|---|"]
    for (outcome, reason), group in groupby(others, key=lambda row: (row.outcome, _reason(row))):
        names = ", ".join(row.case.class_name for row in group)
        lines.append(f"| {outcome} | {reason} | {names} |")
    return "\n".join(lines).rstrip() + "\n"


def _reason(row: Row) -> str:
    """A row's note without what it says of the class alone, so that classes with one reason stand together."""
    reason = re.sub(r"^model: (in )?\S+ (\(model\.type: \S+\) )?(cannot be split into layers: )?", "", row.note)
    return reason.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


if __name__ == "__main__":
    sys.exit(main())
