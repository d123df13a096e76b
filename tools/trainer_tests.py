"""transformers' own tests of its Trainer with the class replaced: which pass, which are refused, and which fail.

    python tools/trainer_tests.py DIRECTORY [--only REGEX] [--limit 240] [--rows FILE]

DIRECTORY is a checkout of transformers, of which `tests/trainer/test_*.py` is read. Each test runs in a process of its
own, first with transformers' own class. If it passes, it runs with Oobleck's, as `python SCRIPT` does: OOBLECK_LOCAL
says on how many virtual nodes. A run trains once, so a test that trains several times runs once for each time, and its
other trainings are transformers' own. Between the two, numbers may differ by 1e-6 of their size: torch takes the norm
by which gradients are clipped in float32, and Oobleck in float64. What fails with Oobleck's class alone, and is not
refused by name, is a fault.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, it finds its neighbours

from oobleck.host.handover import TrainReached
from oobleck.runtime.files import BASE_DIR_VARIABLE

__all__ = ["Row", "Trial", "allow_rounding", "classify", "report", "sweep"]

PASSES, SKIPPED, REFUSED, FAILS, BOTH_FAIL = "passes", "skipped", "refused", "fails", "fails in both"
_ROUNDING = 1e-6
_TESTS = "tests.trainer."
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one run of a test."""

    outcome: str
    note: str = ""
    trainings: int = 0
    """How often it called `train()`."""


@dataclass(frozen=True, slots=True)
class Row:
    """A test with Oobleck's class in one of its trainings."""

    test: str
    training: int
    """From 1 on; 0 for a test that trains nothing."""
    outcome: str
    note: str = ""


def main() -> int:
    """Run what the arguments say and print the rows; returns how many faults there are, up to 100."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a checkout of transformers")
    parser.add_argument("--only", default="", help="a regular expression that a test's name has to match")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one run of a test")
    parser.add_argument("--rows", type=Path, help="a file that keeps what was found, so that a sweep can be continued")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    directory = arguments.directory.resolve()
    sys.path.insert(0, str(directory))
    if arguments.run is not None:  # in a worker
        _run_here(arguments.run[0], int(arguments.run[1]))
        return 1
    rows = list(sweep(directory, only=arguments.only, limit_s=arguments.limit, kept=arguments.rows))
    sys.stdout.write(report(rows))
    return min(100, sum(row.outcome == FAILS for row in rows))


def sweep(directory: Path, *, only: str = "", limit_s: float = 240.0, kept: Path | None = None) -> Iterator[Row]:
    """Run all tests of a checkout; yields a row for each training. `kept` has rows of tests that need not run again."""
    known: dict[str, list[Row]] = {}
    for line in kept.read_text().splitlines() if kept is not None and kept.exists() else ():
        row = Row(**json.loads(line))
        known.setdefault(row.test, []).append(row)
    for path in sorted((directory / "tests" / "trainer").glob("test_*.py")):
        names = _forked(partial(_names, path.stem), limit_s)
        if isinstance(names, str):
            yield Row(path.stem, 0, BOTH_FAIL, names)
            continue
        for test in (name for name in names if re.search(only, name)):
            if test in known:
                yield from known[test]
                continue
            rows = list(_rows_of(directory, test, limit_s))
            for row in rows:
                sys.stderr.write(f"{row.outcome:14} {row.test} {row.training} {row.note[:160]}\n")
            if kept is not None:
                with kept.open("a") as file:
                    file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
            yield from rows


def classify(theirs: Trial, ours: Trial) -> tuple[str, str]:
    """Return the outcome of a test with Oobleck's class, given that with transformers' own, and a note."""
    if theirs.outcome == SKIPPED:
        return SKIPPED, theirs.note
    if theirs.outcome == FAILS:
        return BOTH_FAIL, theirs.note
    return ours.outcome, ours.note


def report(rows: list[Row]) -> str:
    """Return the counts, and all trainings that do not pass."""
    tests = len({row.test for row in rows})
    counts = Counter(row.outcome for row in rows)
    words = ", ".join(f"{counts[each]} {each}" for each in (PASSES, REFUSED, FAILS, BOTH_FAIL, SKIPPED))
    lines = [f"{tests} tests, {len(rows)} runs with Oobleck's class: {words}"]
    lines += [f"{row.outcome}: {row.test} {row.training}: {row.note}" for row in rows if row.outcome != PASSES]
    return "\n".join(lines) + "\n"


def _rows_of(directory: Path, test: str, limit_s: float) -> Iterator[Row]:
    theirs = _trial(directory, limit_s, test, None)
    if theirs.outcome != PASSES:
        yield Row(test, 0, *classify(theirs, theirs))
        return
    for training in range(min(1, theirs.trainings), theirs.trainings + 1):
        yield Row(test, training, *classify(theirs, _trial(directory, limit_s, test, training)))


def _trial(directory: Path, limit_s: float, test: str, training: int | None) -> Trial:
    def run() -> Trial:
        # Workers run this script with these arguments, up to Oobleck's train().
        sys.argv[1:] = [str(directory), "--run", test, str(training)]
        return _run_here(test, training)

    with tempfile.TemporaryDirectory() as base_dir:  # no run finds what another has left
        os.environ[BASE_DIR_VARIABLE] = base_dir
        found = _forked(run, limit_s)
    return Trial(FAILS, found) if isinstance(found, str) else found


# --- in child processes -----------------------------------------------------------------------------------------


def _forked(work: Callable[[], T], limit_s: float) -> T | str:
    """Return what `work` returns in a child process, or why it returns nothing."""
    import oobleck.transformers  # noqa: F401  children have it, and need not import it again

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    with tempfile.TemporaryFile("w+") as output:

        def child() -> None:
            os.setsid()
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            there.send(work())

        process = context.Process(target=child)
        process.start()
        there.close()
        try:
            if here.poll(limit_s):
                return here.recv()  # type: ignore[no-any-return]
            why = f"it did not end within {limit_s:g} s"
        except EOFError:
            why = "its process ended"
        finally:
            if process.is_alive():
                process.join(5.0)
            if process.exitcode is None and process.pid is not None:
                os.killpg(process.pid, signal.SIGTERM)  # its run stops, too
                process.join()
        output.seek(0)
        return f"{why}: {output.read()[-600:]}"


def _names(module: str) -> list[str]:
    found = importlib.import_module(_TESTS + module)
    return [
        f"{module}.{name}.{test}"
        for name, kind in vars(found).items()
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == found.__name__
        for test in unittest.defaultTestLoader.getTestCaseNames(kind)
    ]


def _run_here(test: str, training: int | None) -> Trial:
    """Run a test, with Oobleck's class if `training` is a number: in that training, from 1 on."""
    import transformers

    from oobleck.errors import UserError

    counter = Counter[str]()
    transformers.set_seed(0)
    kind = _counted(counter, training)
    sys.modules["transformers"].Trainer = kind  # type: ignore[attr-defined]  # the module of imports to come
    module, suite, name = test.split(".")
    try:
        case = getattr(importlib.import_module(_TESTS + module), suite)(name)
        if training is not None:
            allow_rounding(case)
        _run_case(case, getattr(case, name))
    except unittest.SkipTest as error:
        return Trial(SKIPPED, str(error))
    except UserError as error:
        return Trial(REFUSED, str(error), counter["trainings"])
    except (Exception, SystemExit) as error:  # noqa: BLE001  a test may raise anything
        return Trial(FAILS, f"{type(error).__name__}: {error}"[:600], counter["trainings"])
    return Trial(PASSES, "", counter["trainings"])


def allow_rounding(case: unittest.TestCase) -> None:
    """Let `assertEqual` take numbers for equal that differ in their last bits."""

    def equal(first: Any, second: Any, msg: Any = None) -> None:
        if not _is_close(first, second):
            raise case.failureException(msg or f"{first!r} != {second!r}"[:600])

    for kind in (float, dict, list):
        case.addTypeEqualityFunc(kind, equal)


def _is_close(first: Any, second: Any) -> bool:
    match first, second:
        case float(), float():
            return first == second or math.isclose(first, second, rel_tol=_ROUNDING)
        case dict(), dict():
            return first.keys() == second.keys() and all(_is_close(first[key], second[key]) for key in first)
        case list(), list():
            return len(first) == len(second) and all(map(_is_close, first, second))
    return bool(first == second)


def _run_case(case: unittest.TestCase, method: Any) -> None:
    # Not by unittest, which takes the end of a script in a worker for an error of the test.
    for each in (type(case), method):
        if getattr(each, "__unittest_skip__", False):
            raise unittest.SkipTest(getattr(each, "__unittest_skip_why__", ""))
    type(case).setUpClass()
    try:
        case.setUp()
        method()
    except TrainReached:
        raise  # a worker still needs what tearDown would take away
    except BaseException:
        _end_case(case)
        raise
    _end_case(case)


def _end_case(case: unittest.TestCase) -> None:
    case.tearDown()
    case.doCleanups()


def _counted(counter: Counter[str], training: int | None) -> type[Any]:
    """Return a Trainer that counts trainings: Oobleck's if there is a number, which then trains that time alone."""
    import transformers

    plain = transformers.Trainer
    # Workers have a wrapper around it, which refuses trainings beside those of the run.
    of_plain = getattr(plain.train, "__wrapped__", plain.train)
    if training is None:
        kind: type[Any] = plain
    else:
        import oobleck.transformers

        kind = oobleck.transformers.Trainer

    def train(self: Any, *arguments: Any, **named: Any) -> Any:
        counter["trainings"] += 1
        run = kind.train if counter["trainings"] == training else of_plain
        return run(self, *arguments, **named)

    return type("Trainer", (kind,), {"train": train})


if __name__ == "__main__":
    sys.exit(main())
