"""Randomness by key: what is drawn depends on names and numbers, never on what was drawn before.

Initial values, dropout and the order of samples must not depend on how the model is cut or on which worker
does the work. So every draw starts from a seed that is a digest of what the draw is for. Knows nothing of
models or data.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

_SCRIPTS = 0
"""The seed that scripts begin with, wherever they run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchKey:
    """Which microbatch of which step a forward pass belongs to: the key of its randomness."""

    seed: int
    step: int
    microbatch: int
    """Number of the microbatch within the step, over all pipelines."""


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) for what `parts` name; equal in every process, different for different parts.

    Each part is preceded by its type and length, so that ("a", "bc") and ("ab", "c") are different.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = str(part).encode()
        digest.update(f"{type(part).__name__}{len(text)}:".encode())
        digest.update(text)
    return int.from_bytes(digest.digest(), "little") >> 1


def seed_device(device: torch.device, seed: int) -> None:
    """Set the state of the generator that models on `device` draw from.

    Goes to the one generator instead of `torch.manual_seed`, which visits every backend and is called here
    once a layer.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_scripts() -> None:
    """Seed all that a script may draw random numbers from, before it begins."""
    random.seed(_SCRIPTS)
    np.random.seed(_SCRIPTS)
    torch.manual_seed(_SCRIPTS)


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Within the block the CPU's generator draws from `seed`; afterwards it continues where it was."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


@contextmanager
def drawing_alike(seed: int, *, beside: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Within the block, code of a script's draws from `seed` whatever it draws from; afterwards all continues where it
    was.

    That is `random`, numpy and torch, and generators of its own, which are given by `beside`: so what it draws depends
    on nothing that this process has done before.
    """
    kept, of_numpy = random.getstate(), np.random.get_state()
    of_own = [(generator, generator.get_state()) for generator in beside]
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for generator, _ in of_own:
        generator.manual_seed(seed)
    try:
        with drawing_from(seed):
            yield
    finally:
        random.setstate(kept)
        np.random.set_state(of_numpy)
        for generator, state in of_own:
            generator.set_state(state)


def building_alike(seed: int) -> AbstractContextManager[None]:
    """Within the block, a script's model with values of its own draws the same wherever a job of `seed` builds it."""
    return drawing_alike(derive_seed(seed, "values of a script's model"))


def generator_states() -> tuple[object, ...]:
    """Return the states of what a script's code draws from, to be compared: `random`, numpy and torch, on the CPU."""
    kind, keys, *others = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), *others, torch.default_generator.get_state().tolist()
