"""Ready-made tokens: files of any size, mapped into memory.

A .npy file declares its type; a .bin file is nothing but tokens, of the type that the job names. Each file is cut into
samples, and the remainder is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from oobleck.errors import ConfigError
from oobleck.job import DataSpec
from oobleck.training.fetched import file_of

TOKEN_SUFFIXES = (".bin", ".npy")
_DIGESTED_SAMPLES = 64


class TokenFiles:
    """Samples from files of tokens. Equal digests mean equal sizes, and equal samples in those that are compared."""

    mask_id = None

    def __init__(self, data: DataSpec) -> None:
        """Map a job's files. Raises ConfigError for a file that cannot be read, or is too short."""
        self._names = data.paths
        self._files = [_open(file_of(path, "data.paths"), data) for path in data.paths]
        self._starts = np.cumsum([0, *(len(file) for file in self._files)])  # the number of each file's first sample
        self.digest = _digest(self._files)
        self.vocab_size = data.vocab_size
        self.num_samples = int(self._starts[-1])
        self.sequence_length = data.sequence_length

    def rows(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return samples by index, [indices, length]. Raises ConfigError for a token beyond the vocabulary."""
        wanted = np.asarray(indices, dtype=np.int64)
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        rows = np.empty((len(wanted), self.sequence_length), dtype=np.int64)
        for row, (number, index) in enumerate(zip(numbers, wanted, strict=True)):
            rows[row] = self._files[number][index - self._starts[number]]
            if rows[row].max() >= self.vocab_size or rows[row].min() < 0:
                raise ConfigError(
                    f"data.paths: {self._names[number]} has the token {rows[row].max()}, and data.vocab_size is "
                    f"{self.vocab_size}; raise it, or check data.token_dtype"
                )
        return rows


def holds_tokens(data: DataSpec) -> bool:
    """Return whether the paths name tokens. Raises ConfigError if only some do."""
    kinds = {Path(path).suffix in TOKEN_SUFFIXES for path in data.paths}
    if len(kinds) > 1:
        raise ConfigError("data.paths: text and tokens (.bin, .npy) cannot be mixed; name one kind")
    return kinds == {True}


def _open(path: Path, data: DataSpec) -> npt.NDArray[np.generic]:
    tokens: npt.NDArray[np.generic]
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False).reshape(-1)
        else:
            tokens = np.memmap(path, dtype=np.dtype(data.token_dtype).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.paths: {path} cannot be read as tokens: {error}") from error
    if tokens.dtype.kind not in "iu":
        raise ConfigError(f"data.paths: {path} holds {tokens.dtype}, which are no tokens")
    num_samples = len(tokens) // data.sequence_length
    if not num_samples:
        raise ConfigError(
            f"data.paths: {path} has {len(tokens)} tokens, which is not one sample of {data.sequence_length}"
        )
    return tokens[: num_samples * data.sequence_length].reshape(num_samples, data.sequence_length)


def _digest(files: Sequence[npt.NDArray[np.generic]]) -> str:
    """Digest the sizes, and samples from all over."""
    # Reading a whole terabyte would take too long.
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.shape}".encode())
        for index in np.linspace(0, len(file) - 1, min(len(file), _DIGESTED_SAMPLES)).astype(np.int64):
            digest.update(np.ascontiguousarray(file[index], dtype="<i8").data)
    return digest.hexdigest()
