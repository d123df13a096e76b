"""How long the rows are that a collator makes: microbatches on pipelines have one length, that of the longest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from oobleck.errors import ConfigError

_TOKENS = "input_ids"


def longest_row(loader: Any) -> int:
    """Return the length of the longest row that a loader's collator makes of its samples. Looks at all of them.

    Raises ConfigError for samples without tokens.
    """
    dataset, collate = loader.dataset, loader.collate_fn
    longest = max(_lengths(dataset), key=lambda found: found[0])[1]
    row = collate([dataset[longest]])
    if _TOKENS not in row:
        raise ConfigError(f"Trainer: data_collator returns no {_TOKENS}; what it returns is {', '.join(sorted(row))}")
    length: int = row[_TOKENS].shape[-1]
    return length


def _lengths(dataset: Any) -> Iterator[tuple[int, int]]:
    """The length of each sample, and its number. What has no tokens of its own counts as 0: its collator adds them."""
    for number, tokens in enumerate(_columns(dataset)):
        yield (0 if tokens is None else len(tokens)), number


def _columns(dataset: Any) -> Iterable[Any]:
    if _TOKENS in (getattr(dataset, "column_names", None) or ()):
        column: Iterable[Any] = dataset[_TOKENS]  # without the other columns
        return column
    return (_tokens_of(dataset[number]) for number in range(len(dataset)))


def _tokens_of(item: Any) -> Any:
    return item.get(_TOKENS) if isinstance(item, Mapping) or hasattr(item, "keys") else None
