"""Finds dropout and noise in models, and turns them off for runs that are compared with others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_WORDS = ("drop", "jitter", "noise")


def draws_at_random(model: PreTrainedModel) -> bool:
    """Return whether a model may draw random numbers in its passes."""
    # A false positive costs a few microseconds a layer; a false negative would make replicas differ.
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    # Models also drop and jitter in functions, by probabilities of their configuration.
    return _has_probability(model.config.to_dict())


def _has_probability(config: Mapping[str, object]) -> bool:
    for key, value in config.items():
        if isinstance(value, dict):
            if _has_probability({str(inner): item for inner, item in value.items()}):
                return True
        elif _is_of_its_blocks(key) and isinstance(value, int | float) and value > 0:
            return True
    return False


def _is_of_its_blocks(key: str) -> bool:
    # Causal language models have no classifier and summary heads, though their configurations have keys for them.
    return _names_a_probability(key) and not key.startswith(("classifier", "summary"))


def _names_a_probability(key: str) -> bool:
    return any(word in key for word in _WORDS)


def turn_off_dropout(model: nn.Module) -> dict[str, float]:
    """Set all dropout probabilities and amounts of noise to zero.

    Returns those above zero, keyed by name in the configuration, or by module where the configuration has no such
    value.
    """
    # Some models drop by modules, others by functions that read a probability from the module or the configuration.
    of_modules: dict[str, float] = {}
    found: dict[str, float] = {}
    owners: dict[int, Any] = {}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2] or type(module).__name__
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            of_modules[name] = max(module.p, of_modules.get(name, 0.0))
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):
            if owner is not None:
                owners[id(owner)] = owner
    for owner in owners.values():
        for key, value in list(_probabilities(owner)):
            found[key] = max(value, found.get(key, 0.0))
            setattr(owner, key, 0.0)
    return found | {name: value for name, value in of_modules.items() if value not in found.values()}


def _probabilities(owner: Any) -> Iterator[tuple[str, float]]:
    for key, value in vars(owner).items():
        is_one = isinstance(value, float) and value > 0 and _names_a_probability(key)
        if is_one and not key.startswith("summary"):  # GPT-2's is for a head that is a module of its own
            yield key, value
