"""A byte-level BPE tokenizer trained on the job's text, or a tokenizer from a file.

A byte-level tokenizer encodes and decodes any text without loss. Training is deterministic: equal text, vocabulary size
and version of the tokenizers library give equal tokens.
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
from oobleck.training.fetched import model_directory

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # the trainer numbers special tokens first

_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
_MASKS = ("[MASK]", "<mask>")

# The words that merges never cross: letters, punctuation or digits with the space before them, or white space. Every
# character matches, so that none is lost between words. The most frequent alternatives come first.
_WORDS = r" ?[^\W\d_]+| ?[^\s\w]+|\s+(?!\S)|\s+| ?\d+|_+"

# The amount of text to learn merges from. Training is most of the cost of preparing the data.
_TRAINING_CHARACTERS = 1_000_000


def train_tokenizer(documents: Sequence[str], *, vocab_size: int) -> Tokenizer:
    """Return a tokenizer of `vocab_size` tokens, or fewer if the text has too few repetitions."""
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
    # Words recur, so this cuts the text into words in place of the library, and encodes each distinct word once.
    numbers: dict[str, int] = {}
    sequence: list[int] = []
    for document in documents:
        sequence.extend(numbers.setdefault(word, len(numbers)) for word in re.findall(_WORDS, document))
        sequence.append(-1)
    encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(numbers), add_special_tokens=False)]
    encoded.append([END_OF_TEXT_ID])  # at the index -1
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
    """Pick documents from all over the text, with about `_TRAINING_CHARACTERS`."""
    total = sum(len(document) for document in documents)
    stride = max(1, -(-total // _TRAINING_CHARACTERS))
    return list(documents[::stride])


def tokenizer_file(path: str) -> Path:
    """Return the file of a tokenizer, given that file or its directory. Raises ConfigError if there is none."""
    named = model_directory(path, "data.tokenizer (by default model.path)")
    file = named / "tokenizer.json" if named.is_dir() else named
    if not file.is_file():
        raise ConfigError(f"data.tokenizer: there is no {file} on this node; name a tokenizer.json, or its directory")
    return file


def load_tokenizer(path: str) -> tuple[Tokenizer, int]:
    """Return a tokenizer from a file, and its token for the end of a text. Raises ConfigError if either is missing."""
    file = tokenizer_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    # The library raises bare exceptions.
    except Exception as error:
        raise ConfigError(f"data.tokenizer: {file} is no tokenizer: {error}") from error
    # A file may configure both, for another use than whole documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    names = (_configured_end(file), *_ENDS)
    end = next((number for name in names if name and (number := tokenizer.token_to_id(name)) is not None), None)
    if end is None:
        raise ConfigError(f"data.tokenizer: {file} has no token for the end of a text; known are {', '.join(_ENDS)}")
    return tokenizer, end


def mask_token_id(tokenizer: Tokenizer) -> int | None:
    return next((number for name in _MASKS if (number := tokenizer.token_to_id(name)) is not None), None)


def encode_whole(tokenizer: Tokenizer, documents: Sequence[str], *, end_id: int) -> npt.NDArray[np.int64]:
    """Return the tokens of all documents, each followed by `end_id`, for any tokenizer."""
    encoded = tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
    return np.fromiter(chain.from_iterable((*each.ids, end_id) for each in encoded), dtype=np.int64)


def _configured_end(file: Path) -> str | None:
    """Return the end token that transformers has recorded next to the tokenizer."""
    try:
        value = json.loads((file.parent / "tokenizer_config.json").read_text())["eos_token"]
    except (OSError, ValueError, KeyError):
        return None
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None
