"""Guess which word was meant by one that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_SHORT = 2


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Say how an unknown word may be put right, as the end of a sentence: by the nearest known one, or by all."""
    choices = sorted(known)
    match = nearest(word, choices)
    return f"did you mean {match}?" if match else f"known are {', '.join(choices)}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is spelled most alike, if one is near; words of one or two letters are near to nothing."""
    longer = [each for each in known if len(each) > _SHORT] if len(word) > _SHORT else []
    return next(iter(get_close_matches(word.lower(), longer, n=1)), None)
