"""Randomness by key: draws depend on names and numbers, never on earlier draws.

Initial values, dropout and the order of samples must not depend on how the model is cut or on which worker computes. So
every draw starts from a seed that is a digest of its purpose. Knows nothing of models or data.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

_SCRIPT_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchKey:
    """The key of a forward pass's randomness."""

    seed: int
    step: int
    microbatch: int
    """The microbatch's number within the step, over all pipelines."""


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) for `parts`; equal in every process, different for different parts."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = str(part).encode()
        # Type and length come first, so that ("a", "bc") and ("ab", "c") differ.
        digest.update(f"{type(part).__name__}{len(text)}:".encode())
        digest.update(text)
    return int.from_bytes(digest.digest(), "little") >> 1


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generator that models on `device` draw from."""
    # Not `torch.manual_seed`, which visits every backend: this runs once a layer.
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def generators_of(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generator that models on `device` draw from beside the CPU's, if there is one."""
    if device.type != "cuda":
        return ()
    index = torch.cuda.current_device() if device.index is None else device.index
    return (torch.cuda.default_generators[index],)


def seed_scripts() -> None:
    """Seed all global generators before a script begins, alike wherever it runs."""
    random.seed(_SCRIPT_SEED)
    np.random.seed(_SCRIPT_SEED)
    torch.manual_seed(_SCRIPT_SEED)


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator with `seed` within the block, and restore its state afterwards."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


@contextmanager
def drawing_alike(seed: int, *, beside: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Seed `random`, numpy, torch and the generators in `beside` within the block, and restore them all afterwards.

    A script's code in the block so draws the same in every process.
    """
    of_random, of_numpy = random.getstate(), np.random.get_state()
    of_others = [(generator, generator.get_state()) for generator in beside]
    random.seed(seed)
    # numpy takes seeds of 32 bits.
    np.random.seed(seed % 2**32)
    for generator, _ in of_others:
        generator.manual_seed(seed)
    try:
        with drawing_from(seed):
            yield
    finally:
        random.setstate(of_random)
        np.random.set_state(of_numpy)
        for generator, state in of_others:
            generator.set_state(state)


def building_alike(seed: int) -> AbstractContextManager[None]:
    """Have a script's model draw the same values in every process that builds it in the block, for a job's seed."""
    return drawing_alike(derive_seed(seed, "values of a script's model"))


def generator_states() -> tuple[object, ...]:
    """Return the states of the CPU's global generators (`random`, numpy, torch), for comparison."""
    kind, keys, *others = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), *others, torch.default_generator.get_state().tolist()
