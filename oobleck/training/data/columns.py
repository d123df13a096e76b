"""Columns that say more of a sample than its tokens, where nothing takes them.

What such a column says is refused by its name, and never dropped in silence, unless it says only what holds without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]

_SAYS_NOTHING: Mapping[str, Callable[[_Array, _Array], bool]] = {
    "attention_mask": lambda _, values: bool(np.all(values == 1)),
    "token_type_ids": lambda _, values: bool(np.all(values == 0)),
    "position_ids": lambda tokens, values: np.array_equal(values, np.arange(len(tokens))),
}
"""(tokens, values) -> whether a column says only what holds without it."""
_OF_TOKENS = frozenset(
    {
        *_SAYS_NOTHING,
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


def says_nothing(name: str, tokens: _Array, values: _Array) -> bool:
    """Whether a column that a model does not take says only what holds without it."""
    rule = _SAYS_NOTHING.get(name)
    return rule is not None and values.shape == tokens.shape and rule(tokens, values)


def problem_with_columns(names: Iterable[str], *, holds_list: Callable[[str], bool]) -> str | None:
    """Say what is wrong with the columns beside a text; None where nothing is.

    The label of a whole text is of no concern to a language model; one for each token is.
    """
    for name in names:
        if name in _OF_TOKENS and holds_list(name):
            return (
                f"its column {name!r} would be dropped, since the text is tokenized here; leave the column out, or "
                "have a script's `data` return samples"
            )
    return None
