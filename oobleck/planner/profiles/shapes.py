"""The shapes of transformer models for estimates, by name or from a transformers configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import chain

from oobleck.errors import ConfigError
from oobleck.job import Scalar, check_model_numbers

_MAY_BE_0 = ("num_positions", "head_size", "num_experts", "experts_per_token", "expert_size")
_ON_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A transformer of equal blocks between an embedding and a head; as blocks of a mixture counts the widest."""

    name: str
    hidden_size: int
    num_blocks: int
    num_heads: int
    vocab_size: int
    num_positions: int
    """Rows of a learned position table; 0 where positions are rotary."""
    feed_forward_size: int
    """The width of what a token passes through: in a mixture, of all experts that it is sent to, and of shared ones."""
    num_kv_heads: int
    head_size: int = 0
    """The width of an attention head; 0 where all heads together are as wide as hidden states."""
    num_experts: int = 0
    """Of a mixture, of which a token is sent to some; 0 where all of a block computes for each token."""
    experts_per_token: int = 0
    expert_size: int = 0
    """The width of one expert."""
    is_gated: bool = False
    """The feed-forward part has three matrices (Llama and its kin) rather than two."""
    is_tied: bool = True
    """The head shares the embedding's matrix; where they are on different stages, both hold it."""
    changes_logits: bool = False
    """The model caps or scales what its head returns, for which it has all logits of a microbatch at once."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (value < 0 or (value == 0 and field.name not in _MAY_BE_0)):
                raise ConfigError(f"model {self.name!r}: {field.name} is {value!r}; it must be above 0")

    @property
    def block_params(self) -> int:
        """Parameters of one block's matrices, biases and norms, those of all its experts among them."""
        others = (self.num_experts - self.experts_per_token) * self.expert_params // max(1, self.num_experts)
        return self.active_params + others

    @property
    def expert_params(self) -> int:
        """Parameters of all experts of one block."""
        return 3 * self.hidden_size * self.num_experts * self.expert_size

    @property
    def active_params(self) -> int:
        """Parameters of one block that compute for a token."""
        attention = 2 * self.hidden_size * (self.attention_size + self.kv_size)
        attention += self.hidden_size * self.num_experts  # the router
        matrices = attention + (3 if self.is_gated else 2) * self.hidden_size * self.feed_forward_size
        if self.is_gated:
            # Two RMS norms, and no biases.
            return matrices + 2 * self.hidden_size
        # The biases of attention and of the feed-forward part; each layer norm has a weight and a bias.
        biases = 2 * self.hidden_size + 2 * self.kv_size + self.feed_forward_size + self.hidden_size
        return matrices + biases + 4 * self.hidden_size

    @property
    def kv_size(self) -> int:
        """The width of the keys, and of the values."""
        return self.attention_size // self.num_heads * self.num_kv_heads

    @property
    def attention_size(self) -> int:
        """The width of the queries of all heads."""
        return self.head_size * self.num_heads or self.hidden_size

    @property
    def embedding_params(self) -> int:
        return (self.vocab_size + self.num_positions) * self.hidden_size

    @property
    def head_params(self) -> int:
        """Parameters of the last layer: the final norm and the head's matrix, a copy if it is tied."""
        return (self.vocab_size + (1 if self.is_gated else 2)) * self.hidden_size

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, tied ones counted once."""
        tied = self.vocab_size * self.hidden_size if self.is_tied else 0
        return self.embedding_params + self.num_blocks * self.block_params + self.head_params - tied


def training_flops(shape: ModelShape, *, num_samples: int, sequence_length: int) -> float:
    """Count the operations of forward and backward passes over `num_samples` samples.

    Matrix products take 2 operations a parameter and token, attention 4 · length · hidden a token and block; the
    backward pass takes twice as many (Narayanan et al. 2021, appendix; causal masks are not exploited). Recomputed
    activations do not count, so a share of a device's peak is a share of useful work.
    """
    tokens = num_samples * sequence_length
    block = 2 * shape.active_params + 4 * sequence_length * shape.attention_size
    head = 2 * shape.vocab_size * shape.hidden_size
    return 3.0 * tokens * (shape.num_blocks * block + head)


def _gpt(name: str, hidden_size: int, num_blocks: int, num_heads: int, num_positions: int = 2048) -> ModelShape:
    return ModelShape(
        name=name,
        hidden_size=hidden_size,
        num_blocks=num_blocks,
        num_heads=num_heads,
        vocab_size=50257,
        num_positions=num_positions,
        feed_forward_size=4 * hidden_size,
        num_kv_heads=num_heads,
    )


KNOWN_MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        # Radford et al. 2019, table 2.
        _gpt("gpt2", 768, 12, 12, 1024),
        _gpt("gpt2-medium", 1024, 24, 16, 1024),
        _gpt("gpt2-large", 1280, 36, 20, 1024),
        _gpt("gpt2-xl", 1600, 48, 25, 1024),
        # Brown et al. 2020, table 2.1.
        _gpt("gpt3-medium", 1024, 24, 16),
        _gpt("gpt3-large", 1536, 24, 16),
        _gpt("gpt3-xl", 2048, 24, 16),
        _gpt("gpt3-2.7b", 2560, 32, 32),
        _gpt("gpt3-6.7b", 4096, 32, 32),
        _gpt("gpt3-13b", 5120, 40, 40),
        _gpt("gpt3-175b", 12288, 96, 96),
        # Devlin et al. 2019; the two token types count as positions.
        replace(_gpt("bert-large", 1024, 24, 16, 514), vocab_size=30522),
    )
}

_ALIASES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_blocks": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "feed_forward_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab_size": ("vocab_size",),
    "num_positions": ("max_position_embeddings", "n_positions"),
    "head_size": ("head_dim",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_size": ("moe_intermediate_size",),
    "num_shared": ("n_shared_experts",),
    "shared_size": ("shared_expert_intermediate_size",),
}
CONFIG_KEYS = (*chain(*_ALIASES.values()), "hidden_act", "tie_word_embeddings", *_ON_LOGITS)
"""What a shape is read from, with `model_type`; a configuration may have several names for one value."""
_LEARNED_POSITIONS = ("gpt2", "gpt_neo", "opt", "bert", "roberta", "electra")


def model_shape(name: str) -> ModelShape:
    """Return the shape of a known model; ConfigError suggests the nearest name."""
    if (shape := KNOWN_MODELS.get(name.lower())) is not None:
        return shape
    near = get_close_matches(name.lower(), KNOWN_MODELS, n=1, cutoff=0.0)[0]
    raise ConfigError(f"model {name!r} is not known; did you mean {near!r}? Known: {', '.join(KNOWN_MODELS)}")


def shape_from_config(config: Mapping[str, Scalar]) -> ModelShape:
    """Return the shape that a transformers configuration, as a plain dictionary, describes.

    This reads the keys of GPT-2, BERT, Llama and their relatives; others raise ConfigError that names the missing key.
    """
    check_model_numbers({key: config[key] for keys in _ALIASES.values() for key in keys if key in config})
    kind = str(config.get("model_type", ""))
    numbers = {field: _number(config, keys) for field, keys in _ALIASES.items()}
    for field in ("hidden_size", "num_blocks", "num_heads", "vocab_size"):
        if numbers[field] is None:
            raise ConfigError(f"model configuration: {_ALIASES[field][0]} is missing")
    hidden_size, num_heads = numbers["hidden_size"] or 0, numbers["num_heads"] or 0
    has_table = kind in _LEARNED_POSITIONS
    width = numbers["feed_forward_size"] or 4 * hidden_size
    mixture: dict[str, int] = {}
    # One expert for all is none to choose from.
    if (num_experts := numbers["num_experts"] or 0) > 1:
        size, chosen = numbers["expert_size"] or width, numbers["experts_per_token"] or 1
        mixture = {"num_experts": num_experts, "experts_per_token": chosen, "expert_size": size}
        width = chosen * size + (numbers["num_shared"] or 0) * size + (numbers["shared_size"] or 0)
    return ModelShape(
        name=str(config.get("name_or_path") or config.get("_name_or_path") or kind or "model"),
        hidden_size=hidden_size,
        num_blocks=numbers["num_blocks"] or 0,
        num_heads=num_heads,
        vocab_size=numbers["vocab_size"] or 0,
        num_positions=(numbers["num_positions"] or 0) if has_table else 0,
        feed_forward_size=width,
        num_kv_heads=numbers["num_kv_heads"] or num_heads,
        head_size=numbers["head_size"] or 0,
        **mixture,
        is_gated=not has_table and config.get("hidden_act", "silu") in ("silu", "gelu_pytorch_tanh"),
        is_tied=bool(config.get("tie_word_embeddings", True)),
        changes_logits=any(config.get(key) is not None for key in _ON_LOGITS),
    )


def shape_of_size(num_parameters: int) -> ModelShape:
    """Return the shape of one block of about this size, for a model whose configuration says no more."""
    size = max(1, math.isqrt(num_parameters // 12))
    return ModelShape(
        name="whole",
        hidden_size=size,
        num_blocks=1,
        num_heads=1,
        vocab_size=1,
        num_positions=0,
        feed_forward_size=4 * size,
        num_kv_heads=1,
    )


def _number(config: Mapping[str, Scalar], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        if (value := config.get(key)) is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"model configuration: {key} is {value!r}; it must be a whole number")
            return value
    return None
