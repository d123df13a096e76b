"""What must be equal on all workers, compared by digest before the first step and at each epoch.

A script runs in every worker, and may behave differently there: it reads a clock, another file, another version of a
library. No error would show that: stages of one pipeline would take tokens of one sample and labels of another.
"""

from __future__ import annotations

from enum import StrEnum

from oobleck.control.protocol import EpochEntered, Things
from oobleck.plan import WorkerId


class Alike(StrEnum):
    """What must be equal, besides versions of packages, and what to change where it differs."""

    advice: str

    def __new__(cls, value: str, advice: str) -> Alike:
        member = str.__new__(cls, value)
        member._value_, member.advice = value, advice
        return member

    DATA = "the data", "give all nodes the same files"
    WEIGHTS = (
        "the weights that training starts from",
        "give model.path the same files on all nodes, and have a script make the same weights wherever it runs",
    )
    STRUCTURE = "the model's structure", "a script must make the same model wherever it runs"
    LOSS = "what the model's loss is", "a script must make the same model wherever it runs"
    ORDER = "the order of samples", "it must follow from the seed and the epoch, not from a clock, a process or a node"
    FIRST_SAMPLES = (
        "the first samples of an epoch",
        (
            "what a dataset and its collator return may follow from random, numpy and torch, which are seeded, "
            "and not from a clock, a process or a node"
        ),
    )


_MOST_EPOCHS = 4


def version_of(package: str) -> str:
    """Return the name under which a package's version is compared."""
    return f"the version of {package}"


def difference(worker: WorkerId, things: Things, other: WorkerId, others: Things) -> str | None:
    """Return the first thing that both workers report and that differs, with what to change; None if none does."""
    theirs = dict(others)
    for thing, mine in things:
        if theirs.get(thing, mine) != mine:
            advice = next((each.advice for each in Alike if each == thing), "install the same on all nodes")
            return f"{worker} and {other} differ in {thing} ({mine} and {theirs[thing]}); {advice}"
    return None


class EpochLikeness:
    """The report of the first worker that entered each of the newest epochs."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[WorkerId, Things]] = {}

    def entered(self, worker: WorkerId, message: EpochEntered) -> str | None:
        """Take a worker's report in; return how it differs from the first one, as `difference` does."""
        first = self._first.setdefault(message.epoch, (worker, message.alike))
        if len(self._first) > _MOST_EPOCHS:
            del self._first[min(self._first)]
        text = difference(worker, message.alike, *first)
        return None if text is None else f"epoch {message.epoch}: {text}"
