"""Tiny configurations of transformers' model types, made from their configuration classes.

Sizes that configurations have in common are shrunk by name, and those of configurations within them too. Where a type
does not take the first attempt, others follow; what none of them builds is left to plain transformers to explain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

__all__ = ["NUM_BLOCKS", "NUM_PLAIN_TOKENS", "VOCAB_SIZE", "tiny_configs"]

NUM_BLOCKS, VOCAB_SIZE = 4, 96
NUM_PLAIN_TOKENS = 88
"""Tokens that stand for nothing but text; those of images and sounds follow."""
_POSITIONS = 64
_BOS, _EOS, _PAD = 1, 2, 0

_WIDTHS = (
    (32, (
        "hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "dim", "word_embed_proj_dim", "emb_dim",
        "projection_dim", "encoder_hidden_size", "decoder_hidden_size", "cross_attention_hidden_size", "lru_width",
        "text_config_hidden_size", "attention_hidden_size", "conv_dim_out", "output_hidden_size", "mm_hidden_size",
    )),
    (48, (
        "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "d_inner",
        "feed_forward_proj_dim", "intermediate_size_mlp", "block_ff_dim", "shared_intermediate_size",
        "dense_intermediate_size", "ffn_hidden_size",
    )),
    (NUM_BLOCKS, (
        "num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "layers",
        "num_encoder_layers", "num_decoder_layers",
    )),
    (4, (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_encoder_attention_heads", "num_decoder_attention_heads", "num_experts", "num_local_experts",
        "n_routed_experts", "moe_num_experts", "num_routed_experts", "num_memory_blocks", "mamba_n_heads",
        "linear_num_heads", "linear_num_value_heads", "mamba_num_heads", "num_buckets", "rotary_dim",
    )),
    (2, (
        "num_key_value_heads", "num_experts_per_tok", "moe_k", "num_experts_per_token", "top_k", "moe_topk",
        "linear_num_key_heads", "num_kv_heads", "decoder_num_key_value_heads", "encoder_num_key_value_heads",
    )),
    (8, (
        "head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "d_kv", "state_size", "mamba_d_state",
        "sliding_window", "sliding_window_size", "ssm_state_size", "linear_key_head_dim", "linear_value_head_dim",
        "mamba_chunk_size", "chunk_size", "patch_size", "attention_window_size", "global_head_dim", "swa_head_dim",
        "kv_channels", "qk_head_dim", "index_head_dim", "local_attention", "d_head", "linear_head_dim",
        "time_step_rank",
    )),
    (16, (
        "moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "expert_ffn_hidden_size", "mamba_d_head",
        "mamba_head_dim", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "hidden_size_per_layer_input", "o_lora_rank", "mamba_dt_rank", "index_topk",
    )),
    (1, ("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace", "n_groups",
        "mamba_n_groups", "num_dense_layers")),
    (VOCAB_SIZE, (
        "vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size",
        "text_vocab_size", "target_vocab_size", "encoder_vocab_size",
    )),
    (_POSITIONS, (
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length",
        "max_seq_length", "max_target_positions", "max_source_positions", "block_size",
        "original_max_position_embeddings", "max_encoder_position_embeddings", "max_decoder_position_embeddings",
        "sequence_length",
    )),
)  # fmt: skip
_SIZES: Mapping[str, int] = {
    **{name: size for size, names in _WIDTHS for name in names},
    "image_size": 32,
    "bos_token_id": _BOS,
    "eos_token_id": _EOS,
    "pad_token_id": _PAD,
    "decoder_start_token_id": _BOS,
    "cls_token_id": _BOS,
    "sep_token_id": _EOS,
    "num_labels": 3,
    "image_token_id": NUM_PLAIN_TOKENS,
    "image_token_index": NUM_PLAIN_TOKENS,
    "video_token_id": NUM_PLAIN_TOKENS + 1,
    "audio_token_id": NUM_PLAIN_TOKENS + 2,
    "audio_token_index": NUM_PLAIN_TOKENS + 2,
    "vision_start_token_id": NUM_PLAIN_TOKENS + 3,
    "vision_end_token_id": NUM_PLAIN_TOKENS + 4,
}
_PROBABILITIES = ("dropout", "drop_path", "layerdrop", "jitter", "_pdrop", "drop_rate", "pdrop", "noise")
_OF_TYPES: Mapping[str, Mapping[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_BLOCKS // 2]], "window_size": 8},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 8), "attn_layers": ["local"] * NUM_BLOCKS,
                 "feed_forward_size": 48},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1},
    "beam": {"num_key_value_heads": 4},
    "dots3_note": {"num_key_value_heads": 4},
    "xlstm": {"num_blocks": NUM_BLOCKS, "embedding_dim": 32},
    "roc_bert": {"pronunciation_vocab_size": VOCAB_SIZE, "shape_vocab_size": VOCAB_SIZE,
                 "pronunciation_embed_dim": 16, "shape_embed_dim": 16},
    "recurrent_gemma": {"block_types": ("recurrent", "attention")},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}  # fmt: skip
"""What no rule could know."""

_ATTEMPTS: Sequence[Mapping[str, Any]] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16},
    {"num_key_value_heads": None, "head_dim": None},
)


def tiny_configs(config_class: type[PreTrainedConfig]) -> Iterator[PreTrainedConfig]:
    """Yield configurations of a class, each smaller than any that is used, until one is good enough.

    What the class raises for the others is passed on once nothing is left.
    """
    problem: Exception | None = None
    for attempt in _ATTEMPTS:
        try:
            config = config_class(**_values(config_class, attempt))
        # What a configuration class raises is its author's choice.
        except Exception as error:  # noqa: BLE001
            problem = problem or error
        else:
            config.use_cache = False
            if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = _BOS
            problem = None
            yield config
    if problem is not None:
        raise problem


def _values(config_class: type[PreTrainedConfig], attempt: Mapping[str, Any]) -> dict[str, Any]:
    fields = {each.name: each for each in dataclasses.fields(config_class)}
    aliases = config_class.attribute_map
    known = {name: value for name, value in {**_SIZES, **attempt}.items() if name in fields or name in aliases}
    values: dict[str, Any] = {}
    for name, value in known.items():
        field = fields.get(aliases.get(name, name))
        if field is None or _fits(field, value):
            values[aliases.get(name, name)] = value
    for name, field in fields.items():
        if any(word in name for word in _PROBABILITIES) and isinstance(field.default, float):
            values[name] = 0.0
    for name, inner in _inner_classes(config_class).items():
        if name in fields and hasattr(inner, "sub_configs") and inner is not PreTrainedConfig and inner.model_type:
            values[name] = _values(inner, attempt)
    return {**values, **_OF_TYPES.get(config_class.model_type, {})}


def _inner_classes(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the classes of the configurations within one; of those of any class, the class of the default."""
    found = dict(config_class.sub_configs)
    if AutoConfig in found.values():
        # What a configuration class raises is its author's choice.
        with suppress(Exception):
            usual = config_class()
            found |= {name: type(getattr(usual, name)) for name, inner in found.items() if inner is AutoConfig}
    return found


def _fits(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a value may stand for a field: no number for a list or a word, and None only where that is allowed."""
    if value is None:
        return field.default is None or "None" in str(field.type)
    return field.default is None or type(field.default) is int
