"""Profiles without the hardware: a model's shape and a device's data sheet in, a profile out.

The times are a roofline: operations at a share of the data sheet's peak, or bytes at its memory rate, whichever takes
longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from oobleck.errors import ConfigError
from oobleck.job import Recompute

from .devices import ASSUMED_COMMUNICATION_BYTES, DeviceSheet
from .profile import LEVELS, DeviceProfile, LayerProfile, NetworkProfile, Profile, Recomputed
from .shapes import ModelShape

ASSUMED_SHARE_OF_PEAK = 0.45
"""The share of the data sheet's operations a second: Narayanan et al. 2021 report 44 to 52 % on A100s."""

MAX_LOGITS = 1 << 27
"""The most logits that a language model has at once: 512 MiB in float32."""

# Parameters, gradients and both moments of Adam are float32: 16 bytes a parameter, with bfloat16 as autocast.
_PARAM_BYTES = 4
_OPTIMIZER_BYTES = 8
_CAST_BYTES = 2
# Bytes moved for each token and hidden unit where a block recomputes all but matrix products and attention, keyed by
# whether it is gated and whether it is computed in half precision. Counted on a CPU (tests/training/model).
_REPEATED = {(True, True): 179, (True, False): 191, (False, True): 213, (False, False): 377}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    shape: ModelShape
    device: DeviceSheet
    network: NetworkProfile
    microbatch_size: int
    sequence_length: int
    is_half: bool
    recompute: Recompute
    device_counts: tuple[int, ...]
    max_logits: int
    expert_parallel: bool
    context_parallel: int

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch that a device computes."""
        return self.microbatch_size * self.sequence_length // self.context_parallel

    @property
    def value_bytes(self) -> int:
        return 2 if self.is_half else 4

    @property
    def output_bytes(self) -> int:
        return self.tokens * self.shape.hidden_size * self.value_bytes

    @property
    def hidden_bytes(self) -> int:
        """Bytes of hidden states, which have the parameters' type: autocast leaves residual sums in it."""
        return self.tokens * self.shape.hidden_size * _PARAM_BYTES

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one value's gradient in a backward pass: with autocast in the computing type, then in float32."""
        return _PARAM_BYTES + (_CAST_BYTES if self.is_half else 0)


def estimate_profile(
    shape: ModelShape,
    device: DeviceSheet,
    *,
    microbatch_size: int,
    sequence_length: int,
    precision: Literal["float32", "bfloat16"] = "bfloat16",
    recompute: Recompute = "none",
    device_counts: Sequence[int] = (1,),
    network: NetworkProfile | None = None,
    max_logits: int = MAX_LOGITS,
    expert_parallel: bool = False,
    context_parallel: int = 1,
) -> Profile:
    """Return an estimated profile, labelled as such; `network` overrides the data sheet's usual links.

    The standard loss of language models has at most `max_logits` at once. With `expert_parallel`, experts stay on the
    devices of a sharded stage. Tokens are taken to be spread evenly over experts. `context_parallel` devices share each
    microbatch, whose costs are those of one of them. Raises ConfigError where they cannot share its tokens and heads.
    """
    if precision not in ("float32", "bfloat16"):
        raise ConfigError(f"precision {precision!r} is not possible; it must be 'float32' or 'bfloat16'")
    if shape.num_positions and sequence_length > shape.num_positions:
        raise ConfigError(
            f"sequence length {sequence_length} exceeds the {shape.num_positions} positions of {shape.name}"
        )
    setting = _Setting(
        shape=shape,
        device=device,
        network=network or device.network,
        microbatch_size=microbatch_size,
        sequence_length=sequence_length,
        is_half=precision == "bfloat16",
        recompute=recompute,
        device_counts=tuple(device_counts),
        max_logits=max_logits,
        expert_parallel=expert_parallel,
        context_parallel=context_parallel,
    )
    if sequence_length % context_parallel or shape.num_heads % context_parallel:
        raise ConfigError(
            f"{context_parallel} devices cannot share samples of {sequence_length} tokens and {shape.num_heads} heads"
        )
    block = _block(setting)
    blocks = [replace(block, name=f"block.{index}") for index in range(shape.num_blocks)]
    return Profile(
        model=shape.name,
        microbatch_size=microbatch_size,
        sequence_length=sequence_length,
        layers=(_embedding(setting), *blocks, _head(setting)),
        device=DeviceProfile(
            name=device.name,
            memory_bytes=device.memory_bytes,
            communication_bytes=0 if device.is_host else ASSUMED_COMMUNICATION_BYTES,
        ),
        network=setting.network,
        estimated=True,
    )


def _embedding(setting: _Setting) -> LayerProfile:
    # A lookup moves bytes and computes nothing, in either pass.
    seconds = dict.fromkeys(setting.device_counts, _seconds(setting, 0, 2 * setting.output_bytes))
    params = setting.shape.embedding_params
    # Kept: the tokens, 8 bytes each, and a dropout mask of 1 byte a value.
    kept = setting.tokens * (8 + setting.shape.hidden_size)
    # The backward pass adds to a gradient as large as the table.
    gradients = (setting.shape.vocab_size + setting.tokens) * setting.shape.hidden_size
    transient_bytes = _PARAM_BYTES * gradients
    return _layer(setting, "embedding", seconds, seconds, params, kept, transient_bytes=transient_bytes, is_cast=False)


def _block(setting: _Setting) -> LayerProfile:
    shape, tokens = setting.shape, setting.tokens
    # Matrix products take 2 operations for each parameter and token, and attention 4 · length · hidden for each token
    # (Narayanan et al. 2021, appendix; causal masks are not exploited).
    flops = 2 * shape.active_params * tokens + 4 * tokens * setting.sequence_length * shape.attention_size
    kept = tokens * _kept_of_token(setting)
    forward, backward = {}, {}
    more_s: dict[str, dict[int, float]] = {level: {} for level in LEVELS}
    for count in setting.device_counts:
        params_bytes = _PARAM_BYTES * shape.block_params
        compute = _seconds(setting, flops / count, (params_bytes + kept) / count)
        # Devices share a block as in Megatron-LM (Shoeybi et al. 2019): two all-reduces of its output in each pass.
        reduced = 2 * _all_reduce_s(setting, count)
        forward[count] = compute + reduced
        backward[count] = 2 * compute + reduced
        more_s["selective"][count] = _seconds(setting, 0.0, _repeated_bytes(setting) / count)
        more_s["all"][count] = compute + reduced
    widest = max(shape.feed_forward_size, shape.hidden_size)
    # A mixture keeps the matrices of all its experts in one parameter, whose gradient comes whole.
    largest = max(shape.hidden_size * widest, 2 * shape.expert_params // 3)
    gradients = setting.gradient_bytes * (tokens * widest + largest)
    block = _layer(setting, "block", forward, backward, shape.block_params, kept, transient_bytes=gradients)
    kept_at = {"selective": tokens * _kept_of_products(setting), "all": setting.hidden_bytes}
    recomputed = {
        level: Recomputed(
            more_s=more_s[level],
            activation_bytes=kept_at[level],
            # A block is computed again before its gradients are.
            transient_bytes=0 if setting.device.is_host else gradients + kept - kept_at[level] * (level != "all"),
        )
        for level in LEVELS
    }
    if setting.expert_parallel:
        block = replace(
            block,
            expert_bytes=_PARAM_BYTES * shape.expert_params,
            expert_message_bytes=shape.experts_per_token * setting.output_bytes,
        )
    if setting.context_parallel > 1:
        # Queries, keys and values there, and outputs back, of which a device keeps its own share.
        repeats = max(1, setting.context_parallel // shape.num_kv_heads)
        features = 2 * (shape.attention_size + repeats * shape.kv_size)
        sent = (setting.context_parallel - 1) / setting.context_parallel
        block = replace(block, context_bytes=int(sent * tokens * features * setting.value_bytes))
    if setting.recompute == "auto":
        return replace(block, recomputed=recomputed)
    return block if setting.recompute == "none" else block.at(recomputed[setting.recompute])


def _kept_of_products(setting: _Setting) -> int:
    """Return the bytes that a block keeps of one token where it recomputes all but matrix products and attention."""
    shape = setting.shape
    # Queries, keys and values, attention, the outputs of both parts, and what goes through the feed-forward part.
    outputs = 2 * (
        shape.hidden_size + shape.attention_size + shape.kv_size + shape.experts_per_token * shape.hidden_size
    )
    outputs += (2 if shape.is_gated else 1) * shape.feed_forward_size
    return _PARAM_BYTES * shape.hidden_size + setting.value_bytes * outputs


def _repeated_bytes(setting: _Setting) -> int:
    """Return the bytes that a block moves to recompute all but matrix products and attention."""
    return _REPEATED[setting.shape.is_gated, setting.is_half] * setting.tokens * setting.shape.hidden_size


def _kept_of_token(setting: _Setting) -> int:
    """Return the bytes that a block keeps of one token for its backward pass."""
    # After Korthikanti et al. 2022, but for transformers' eager modules under autocast, and for attention that keeps no
    # scores (torch's scaled_dot_product_attention). Residual sums and norms are in float32.
    shape = setting.shape
    norms = (4 if shape.is_gated else 2) * _PARAM_BYTES  # an RMS norm keeps what it has normalized as well
    # Two masks of dropout, which Llama and its kin lack: of bytes on a GPU, and of factors on a CPU.
    masks = 0 if shape.is_gated else 2 * (setting.value_bytes if setting.device.is_host else 1)
    # Autocast casts a norm's output for each matrix that reads it: queries, keys, values, gate and up, or two matrices.
    inputs = 5 if shape.is_gated and setting.is_half else 2
    attention = 2 * shape.attention_size + 2 * shape.kv_size
    # What is sent to a token's experts, and what they return.
    attention += 2 * shape.experts_per_token * shape.hidden_size
    wide = (4 if shape.is_gated else 5) * shape.feed_forward_size
    kept = (norms + masks) * shape.hidden_size
    kept += setting.value_bytes * (inputs * shape.hidden_size + attention + wide)
    if setting.device.is_host and not shape.is_gated:
        # With dropout, a CPU's attention keeps the scores three times, in float32.
        kept += 12 * setting.sequence_length * shape.num_heads
    return kept


def _head(setting: _Setting) -> LayerProfile:
    shape, tokens = setting.shape, setting.tokens
    flops = 2 * tokens * shape.vocab_size * shape.hidden_size
    logits = 4 * tokens * shape.vocab_size
    forward = {count: _seconds(setting, flops / count, 2 * logits / count) for count in setting.device_counts}
    backward = {count: 2 * seconds for count, seconds in forward.items()}
    weight_gradient = setting.gradient_bytes * shape.vocab_size * shape.hidden_size
    is_chunked = setting.context_parallel > 1 or tokens * shape.vocab_size > setting.max_logits
    if not is_chunked or shape.changes_logits:
        # Kept: the log-probabilities, in float32, and the inputs of the norm and the matrix.
        kept = logits + setting.hidden_bytes + setting.output_bytes
        # The loss has gradients of the log-probabilities and of the logits at once.
        transient_bytes = 2 * logits + weight_gradient
    else:
        # Head and loss take chunks of tokens in both directions. Kept: the gradients of the matrix and of its input,
        # and what an RMS norm has normalized.
        kept = _PARAM_BYTES * shape.vocab_size * shape.hidden_size + setting.output_bytes
        kept += setting.hidden_bytes if shape.is_gated else 0
        # A chunk has logits, log-probabilities and the gradients of both, and then a gradient of the matrix of its own.
        chunk = max(1, setting.max_logits // shape.vocab_size) * shape.vocab_size
        transient_bytes = max(16 * chunk, weight_gradient + 2 * setting.value_bytes * chunk)
    return _layer(
        setting, "head", forward, backward, shape.head_params, kept, transient_bytes=transient_bytes, last=True
    )


def _layer(
    setting: _Setting,
    name: str,
    forward: dict[int, float],
    backward: dict[int, float],
    params: int,
    activation_bytes: int,
    *,
    transient_bytes: int,
    is_cast: bool = True,
    last: bool = False,
) -> LayerProfile:
    """Return a layer; `transient_bytes` are gradients of its widest tensor and largest matrix, and recomputations."""
    # Autocast does not cast the few weights of norms, which this counts as well.
    cast_bytes = _CAST_BYTES if is_cast and setting.is_half else 0
    layer = LayerProfile(
        name=name,
        forward_s=forward,
        backward_s=backward,
        param_bytes=_PARAM_BYTES * params,
        optimizer_bytes=_OPTIMIZER_BYTES * params,
        activation_bytes=activation_bytes,
        output_bytes=0 if last else setting.output_bytes,
    )
    if setting.device.is_host:
        return layer
    return replace(
        layer,
        # A GPU also holds gradients being summed, weights cast by autocast, the transients of passes, and messages.
        copy_bytes=(_PARAM_BYTES + cast_bytes) * params,
        transient_bytes=transient_bytes,
        message_bytes=0 if last else setting.hidden_bytes,
    )


def _seconds(setting: _Setting, flops: float, moved_bytes: float) -> float:
    peak = setting.device.bfloat16_flops if setting.is_half else setting.device.float32_flops
    return max(flops / (ASSUMED_SHARE_OF_PEAK * peak), moved_bytes / setting.device.memory_bytes_per_s)


def _all_reduce_s(setting: _Setting, num_devices: int) -> float:
    if num_devices == 1:
        return 0.0
    network = setting.network
    moved = 2 * (num_devices - 1) / num_devices * setting.output_bytes
    return moved / network.intra_node_bytes_per_s + 2 * (num_devices - 1) * network.intra_node_latency_s
