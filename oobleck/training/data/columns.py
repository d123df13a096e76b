"""Columns that say more about a sample than its tokens, where no part of a model takes them.

Such a column is an error that names it, unless it only states the default. It is never dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]

_STATES_DEFAULT: Mapping[str, Callable[[_Array, _Array], bool]] = {
    "attention_mask": lambda _, values: bool(np.all(values == 1)),
    "token_type_ids": lambda _, values: bool(np.all(values == 0)),
    "position_ids": lambda tokens, values: np.array_equal(values, np.arange(len(tokens))),
}
_OF_TOKENS = frozenset(
    {
        *_STATES_DEFAULT,
        "labels",
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


def states_default(name: str, tokens: _Array, values: _Array) -> bool:
    """Return whether a column that a model does not take only states what holds without it."""
    rule = _STATES_DEFAULT.get(name)
    return rule is not None and values.shape == tokens.shape and rule(tokens, values)


def problem_with_columns(names: Iterable[str], *, holds_list: Callable[[str], bool]) -> str | None:
    """Return what is wrong with the columns next to a text, or None."""
    # A language model does not need the label of a whole text, but it needs one for each token.
    for name in names:
        if name in _OF_TOKENS and holds_list(name):
            return (
                f"its column {name!r} would be dropped, since the text is tokenized here; leave the column out, or "
                "have a script's `data` return samples"
            )
    return None
