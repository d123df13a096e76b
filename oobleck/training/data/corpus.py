"""A text's tokens in a file, made once per machine, without torch.

Documents are concatenated with an end-of-text token after each, and cut into samples of `sequence_length` tokens; the
remainder is dropped. All processes of a machine map the file into memory. A digest of all its inputs identifies it, so
a change of the text makes a new file.

Without torch, a machine can make the file while its workers still import torch:
`python -m oobleck.training.data.corpus CACHE_DIR JSON`, with the fields of a `DataSpec` as a JSON object.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Tokenizer

from oobleck.errors import ConfigError, ResourceLost
from oobleck.host.writing import write_in_place
from oobleck.job import DataSpec

from . import tokenizer as tokenizing
from .text import read_documents
from .token_files import holds_tokens

Samples = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
"""[samples, length]"""

_FORMAT = 1  # to be raised when equal text gives different tokens
_LOCK_TIMEOUT_S = 600.0
_LOCK_POLL_S = 0.02
_TOKENS, _TOKENIZER, _MANIFEST = "tokens.npy", "tokenizer.json", "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The tokens of all samples, mapped from a file. Equal digests mean equal samples."""

    samples: Samples
    digest: str
    vocab_size: int
    tokenizer_path: Path

    @property
    def num_samples(self) -> int:
        return int(self.samples.shape[0])

    @property
    def sequence_length(self) -> int:
        return int(self.samples.shape[1])

    @property
    def mask_id(self) -> int | None:
        return tokenizing.mask_token_id(Tokenizer.from_file(str(self.tokenizer_path)))

    def rows(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return samples by index, [indices, length]."""
        return self.samples[np.asarray(indices, dtype=np.int64)].astype(np.int64)


def prepare_corpus(data: DataSpec, *, cache_dir: Path) -> Corpus:
    """Return the corpus that `data` describes, and make it unless `cache_dir` has it. Blocks.

    If several processes call this at once, one does the work and the others wait for it, 600 s at most. Raises
    ConfigError if the text cannot be read or is too short for one sample, and ResourceLost if another process has held
    the lock for too long or the disk refuses the files.
    """
    documents = read_documents(data)
    directory = cache_dir / _key(data, documents)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_suffix(".lock")):
        corpus = _load(directory)
        if corpus is None:
            _make(data, documents, directory)
            corpus = _load(directory)
            assert corpus is not None, f"{directory} was written and cannot be read"
    return corpus


def _key(data: DataSpec, documents: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    own = None if data.tokenizer is None else tokenizing.tokenizer_file(data.tokenizer).read_bytes()
    size = data.vocab_size if own is None else None
    digest.update(repr((_FORMAT, tokenizers.__version__, data.sequence_length, size)).encode())
    digest.update(own or b"")
    for document in documents:
        content = document.encode()
        digest.update(f"{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _make(data: DataSpec, documents: Sequence[str], directory: Path) -> None:
    """Write tokens and tokenizer next to `directory`, then move them there together."""
    if data.tokenizer is None:
        tokenizer = tokenizing.train_tokenizer(documents, vocab_size=data.vocab_size)
        tokens = tokenizing.encode_documents(tokenizer, documents)
    else:
        tokenizer, end = tokenizing.load_tokenizer(data.tokenizer)
        tokens = tokenizing.encode_whole(tokenizer, documents, end_id=end)
    num_samples = len(tokens) // data.sequence_length
    if not num_samples:
        raise ConfigError(
            f"data: the text has {len(tokens)} tokens, which is not one sample of {data.sequence_length}; "
            "give more text, or lower data.sequence_length"
        )
    vocab_size = tokenizer.get_vocab_size()
    rows = tokens[: num_samples * data.sequence_length].reshape(num_samples, data.sequence_length)
    samples: Samples = rows.astype(np.uint16) if vocab_size <= 1 << 16 else rows.astype(np.uint32)
    manifest = {"digest": samples_digest(samples), "vocab_size": vocab_size}

    unfinished = directory.with_suffix(f".{os.getpid()}")
    try:
        # A killed process may have had the same id.
        unfinished.mkdir(exist_ok=True)
        np.save(unfinished / _TOKENS, samples)
        write_in_place(unfinished / _TOKENIZER, tokenizer.to_str(pretty=True))
        write_in_place(unfinished / _MANIFEST, json.dumps(manifest))
        # A damaged corpus may be there, and a directory cannot be renamed onto one that is not empty.
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.rename(directory)
    except OSError as error:
        raise ResourceLost(f"the tokenised text cannot be kept in {directory}: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _load(directory: Path) -> Corpus | None:
    """Return the cached corpus, or None if it is missing or damaged."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text())
        tokens = np.load(directory / _TOKENS, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    # Nothing syncs the files to disk, so a crash of the machine may leave damaged ones.
    if tokens.ndim != 2 or samples_digest(tokens) != manifest["digest"]:
        return None
    return Corpus(
        samples=tokens,
        digest=manifest["digest"],
        vocab_size=manifest["vocab_size"],
        tokenizer_path=directory / _TOKENIZER,
    )


def samples_digest(samples: Samples) -> str:
    """Digest the samples themselves, so that nodes that made them in different ways can be compared."""
    digest = hashlib.blake2b(f"{samples.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(samples, dtype="<u4").data)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which the kernel releases when the process dies."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A blocking `flock` would have no timeout.
                if time.monotonic() > deadline:
                    problem = f"{path} has been locked by another process for {_LOCK_TIMEOUT_S:.0f} s"
                    raise ResourceLost(problem) from None
            time.sleep(_LOCK_POLL_S)
        yield


if __name__ == "__main__":
    fields = json.loads(sys.argv[2])
    asked = DataSpec(**{**fields, "paths": tuple(fields.get("paths", ()))})
    if asked.format == "text" and not holds_tokens(asked):
        prepare_corpus(asked, cache_dir=Path(sys.argv[1]))
