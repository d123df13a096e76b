"""Columns that say more of a sample than its tokens: labels, masks, types.

Training here knows tokens alone: it predicts each from those before it, or those that it masks itself. So what a
column says to the contrary is refused by its name, and never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["problem_with_columns", "problem_with_row"]

_Tokens = npt.NDArray[np.int64]

_SAYS_NOTHING: Mapping[str, Callable[[_Tokens, _Tokens], bool]] = {
    "labels": np.array_equal,
    "attention_mask": lambda _, values: bool(np.all(values == 1)),
    "token_type_ids": lambda _, values: bool(np.all(values == 0)),
    "position_ids": lambda tokens, values: np.array_equal(values, np.arange(len(tokens))),
}
"""(tokens, values) -> whether a column says only what holds without it."""
_UNKNOWN = frozenset(
    {
        *_SAYS_NOTHING,
        "label",
        "label_ids",
        "loss_mask",
        "completion_mask",
        "assistant_masks",
        "special_tokens_mask",
        "decoder_input_ids",
        "decoder_attention_mask",
        "sample_weight",
        "weight",
        "weights",
    }
)
_REMEDY = "is not supported yet, and would be dropped; leave the column out"


def problem_with_row(item: Mapping[str, Any], tokens: _Tokens) -> str | None:
    """Say what is wrong with the columns beside a sample's tokens; None where they change nothing."""
    for name in item:
        if name not in _UNKNOWN or item[name] is None:
            continue
        says_nothing = _SAYS_NOTHING.get(name)
        values = np.asarray(item[name])
        if says_nothing is None or values.shape != tokens.shape or not says_nothing(tokens, values):
            return f"its column {name!r} {_REMEDY}"
    return None


def problem_with_columns(names: Iterable[str], *, holds_list: Callable[[str], bool]) -> str | None:
    """Say what is wrong with the columns beside a text; None where nothing is.

    The label of a whole text is of no concern to a language model; one for each token is.
    """
    for name in names:
        if name in _UNKNOWN and holds_list(name):
            return f"its column {name!r} {_REMEDY}"
    return None
