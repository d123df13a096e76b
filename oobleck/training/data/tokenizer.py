"""A byte-level BPE tokenizer, trained on the given text, or one from a file.

Byte-level, so that any text can be encoded and decoded without loss. Training is deterministic: equal text,
vocabulary size and version of the tokenizers library give equal tokens.

Text is cut into words here rather than by the library: words recur, so each distinct one is encoded once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from oobleck.errors import ConfigError
from oobleck.host.user_path import expand_user

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
"""The trainer numbers special tokens first."""

_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
"""What tokenizers call the end of a text."""
_MASKS = ("[MASK]", "<mask>")

_WORDS = r" ?[^\W\d_]+| ?[^\s\w]+|\s+(?!\S)|\s+| ?\d+|_+"
"""What merges never cross: letters, punctuation and digits, with the space before them, and white space. It
matches every character, so that nothing is lost between words. The most frequent alternatives come first."""

_TRAINING_CHARACTERS = 1_000_000
"""How much of the text the merges are learned from. Training is most of what preparing the data costs."""


def train_tokenizer(documents: Sequence[str], *, vocab_size: int) -> Tokenizer:
    """Return a tokenizer of at most `vocab_size` tokens; fewer if the text has too few repetitions for more."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_spread(documents), trainer)
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the tokens of all documents, each followed by the end of text. O(characters)."""
    numbers: dict[str, int] = {}
    sequence: list[int] = []
    for document in documents:
        sequence.extend(numbers.setdefault(word, len(numbers)) for word in re.findall(_WORDS, document))
        sequence.append(-1)
    encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(numbers), add_special_tokens=False)]
    encoded.append([END_OF_TEXT_ID])  # What -1 stands for.
    return _concatenate(encoded, np.array(sequence, dtype=np.int64))


def _concatenate(pieces: Sequence[Sequence[int]], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return pieces[order[0]] + pieces[order[1]] + …, without a loop over `order`."""
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    flat = np.fromiter(chain.from_iterable(pieces), dtype=np.int64, count=int(lengths.sum()))
    starts = np.cumsum(lengths) - lengths
    counts = lengths[order]
    ends = np.cumsum(counts)
    if not counts.size:
        return np.empty(0, dtype=np.int64)
    offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    tokens: npt.NDArray[np.int64] = flat[np.repeat(starts[order], counts) + offsets]
    return tokens


def _spread(documents: Sequence[str]) -> list[str]:
    """Pick documents from all over the text, about as much as is trained on."""
    total = sum(len(document) for document in documents)
    stride = max(1, -(-total // _TRAINING_CHARACTERS))
    return list(documents[::stride])


def tokenizer_file(path: str) -> Path:
    """Return the file of a tokenizer that is named by itself or by its directory. Raises ConfigError without one."""
    given = expand_user(path)
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        raise ConfigError(f"data.tokenizer: there is no {file} on this node; name a tokenizer.json, or its directory")
    return file


def load_tokenizer(path: str) -> tuple[Tokenizer, int]:
    """Return a tokenizer from a file, and its token for the end of a text. Raises ConfigError where there is none."""
    file = tokenizer_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    # The library raises bare exceptions.
    except Exception as error:
        raise ConfigError(f"data.tokenizer: {file} is no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    names = (_configured_end(file), *_ENDS)
    end = next((number for name in names if name and (number := tokenizer.token_to_id(name)) is not None), None)
    if end is None:
        raise ConfigError(f"data.tokenizer: {file} has no token for the end of a text; known are {', '.join(_ENDS)}")
    return tokenizer, end


def mask_token_id(tokenizer: Tokenizer) -> int | None:
    """Return the token that stands for a masked one, if there is one."""
    return next((number for name in _MASKS if (number := tokenizer.token_to_id(name)) is not None), None)


def encode_whole(tokenizer: Tokenizer, documents: Sequence[str], *, end_id: int) -> npt.NDArray[np.int64]:
    """Return the tokens of all documents, each followed by `end_id`, however the tokenizer cuts them into words."""
    encoded = tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
    return np.fromiter(chain.from_iterable((*each.ids, end_id) for each in encoded), dtype=np.int64)


def _configured_end(file: Path) -> str | None:
    """What transformers has noted beside the tokenizer."""
    try:
        value = json.loads((file.parent / "tokenizer_config.json").read_text())["eos_token"]
    except (OSError, ValueError, KeyError):
        return None
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None
