"""How many floating-point operations a model's training takes: what utilisation is measured in."""

from __future__ import annotations

from .shapes import ModelShape


def training_flops(shape: ModelShape, *, num_samples: int, sequence_length: int) -> float:
    """Count the operations of forward and backward passes over so many samples, none of them done twice.

    Matrix products take 2 operations a parameter and token, attention 4 · length · hidden a token and block; the
    backward pass takes twice as many (Narayanan et al. 2021, appendix; causal masks are not exploited).
    Recomputed activations do not count, so that the share of a device's peak is one of useful work.
    """
    tokens = num_samples * sequence_length
    block = 2 * shape.block_params + 4 * sequence_length * shape.hidden_size
    head = 2 * shape.vocab_size * shape.hidden_size
    return 3.0 * tokens * (shape.num_blocks * block + head)
