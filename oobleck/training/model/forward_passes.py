"""How forward passes compute: types, attention, compilation by torch, and recomputation in the backward pass.

Wrappers of a block wrap only `forward`, not the module, so that a stage's hooks (seeding, replacing hidden states) run
once, outside.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.job import CompileMode, Recompute
from oobleck.training.data import Batch

_of_thread = threading.local()

# Operations that take long for the bytes that they return, by torch's names. Products of batches of matrices are not
# among them: where attention is made of these, they return its scores.
_PRODUCTS = ("mm", "addmm", "_grouped_mm")
_ATTENTION = tuple(
    f"_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
)


def compile_forward(module: nn.Module, mode: CompileMode) -> None:
    """Have torch compile a block's forward and backward pass when they first run.

    Equal blocks share the compiled code, and processes share it through torch's cache on the disk. The process that
    measures the profile compiles first, before any worker trains.
    """
    # There is one worker per core already; torch would start several more processes to compile in.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    module.forward = torch.compile(module.forward, dynamic=False, mode=mode)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that compiled code calls it as it is: devices exchange tensors in it."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return,no-untyped-call]


def require_compiler(
    device: torch.device, *, find: Callable[[str], str | None] = shutil.which, headers: Path | None = None
) -> None:
    """Raise ConfigError if torch would not find a compiler. `headers` replaces the directory of Python's."""
    # For a GPU, Triton compiles the code that launches its kernels, which is a module of Python's in C.
    variable, known = ("CXX", ("g++", "clang++")) if device.type == "cpu" else ("CC", ("gcc", "clang"))
    wanted = (os.environ[variable],) if variable in os.environ else known
    if not any(find(name) for name in wanted):
        raise ConfigError(f"compile: there is no {' or '.join(wanted)} here; install it on every node, or leave it out")
    headers = headers or Path(sysconfig.get_paths()["include"])
    if device.type != "cpu" and not (headers / "Python.h").exists():
        raise ConfigError(
            f"compile: there is no Python.h in {headers}; install Python's headers (python3-dev) on every node, or "
            "leave it out"
        )


class RecomputingBlock:
    """A block that recomputes in the backward pass what its `level` says, instead of keeping it from the forward pass.

    `all` keeps the block's input alone (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016);
    `selective` keeps the outputs of matrix products and attention as well, and repeats the rest. Dropout draws the same
    numbers again. No bit of a result depends on the level.
    """

    def __init__(
        self, module: nn.Module, *, level: Recompute, draws_at_random: bool, computing: Callable[[], None]
    ) -> None:
        """`level` may be `auto`, which keeps all until another one is set; `computing` precedes each computation."""
        self.level: str = level
        self._computing = computing
        self._module, self._forward, self._draws_at_random = module, module.forward, draws_at_random
        # Attention that draws at random has to draw again: if it were kept, what follows would draw other numbers.
        kept = _PRODUCTS if draws_at_random else _PRODUCTS + _ATTENTION
        self._selective = partial(create_selective_checkpoint_contexts, _operations(kept))
        module.forward = self._compute

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        if not self._module.training or self.level not in ("selective", "all"):
            return self._forward(*args, **kwargs)
        context: Any = {"context_fn": self._selective} if self.level == "selective" else {}
        draws = self._draws_at_random
        return checkpoint(self._begin, *args, use_reentrant=False, preserve_rng_state=draws, **context, **kwargs)

    def _begin(self, *args: Any, **kwargs: Any) -> Any:
        self._computing()
        return self._forward(*args, **kwargs)


def _operations(names: Iterable[str]) -> list[Any]:
    """Return torch's operations of these names that it has."""
    return [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]


def prepare_whole(model: nn.Module, *, recompute: Recompute, compiles: CompileMode | None) -> None:
    """Set up a model that is kept whole. Raises ConfigError where it cannot recompute, or is to be compiled."""
    name = type(model).__name__
    if compiles:
        raise ConfigError(f"compile: {name} is kept whole, and blocks alone are compiled; leave it out")
    if recompute == "none":
        return
    if recompute != "all":
        raise ConfigError(f"recompute: {name} is kept whole, and cannot be {recompute}; choose none or all")
    if not isinstance(model, PreTrainedModel) or not model.supports_gradient_checkpointing:
        raise ConfigError(f"recompute: {name} is kept whole, and cannot do it itself; leave it out")
    enable: Any = model.gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def keep_casts(output: torch.Tensor) -> None:
    """Have the backward pass of an output leave autocast's casts of weights to the forward passes that follow."""
    forward_thread, kind = threading.get_ident(), output.device.type  # not the output, which the hook would keep

    def begin(_gradient: torch.Tensor) -> None:
        # On a GPU, autograd has a thread of its own, which outlives the pass. Torch counts nested autocasts by thread,
        # and drops the casts of all threads when the outermost of any ends: so that thread never leaves this one.
        if threading.get_ident() != forward_thread and not hasattr(_of_thread, "outermost"):
            _of_thread.outermost = torch.autocast(kind, enabled=False)
            _of_thread.outermost.__enter__()

    output.register_hook(begin)  # type: ignore[no-untyped-call]


def use_attention(model: nn.Module, name: str) -> None:
    """Have a model compute attention by an implementation. Raises ConfigError where it cannot."""
    if not isinstance(model, PreTrainedModel):
        raise _cannot(model, name, "the layers of a script compute attention themselves")
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise _cannot(model, name, " ".join(str(error).split())) from error
    # Where a model or a package has no such implementation, transformers may take another, with a warning at most.
    used = {each.config._attn_implementation for each in model.modules() if isinstance(each, PreTrainedModel)}
    if used != {name}:
        raise _cannot(model, name, f"transformers would take {', '.join(map(str, sorted(used - {name})))}")


def use_plain_experts(model: nn.Module) -> None:
    """Have a mixture compute expert by expert, in every type of numbers."""
    # By default transformers takes torch's `grouped_mm`, which has no float64.
    if isinstance(model, PreTrainedModel) and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def check_attention(name: str | None, batch: Batch) -> None:
    """Raise ConfigError for a batch whose masks an implementation would ignore."""
    if name is None or not name.startswith("flash"):
        return
    # Transformers has it separate documents by their positions in batches of one sample only.
    if "position_ids" in batch.others and len(batch.input_ids) > 1:
        raise ConfigError(
            f"attn_implementation: with {name}, samples of several documents (position_ids) need a microbatch_size of 1"
        )
    if (mask := batch.others.get("attention_mask")) is not None and mask.ndim > 2:
        raise ConfigError(f"attn_implementation: {name} takes no attention_mask of {mask.ndim} dimensions; take sdpa")


def _cannot(model: nn.Module, name: str, why: str) -> ConfigError:
    return ConfigError(f"attn_implementation: {type(model).__name__} cannot use {name} here: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The types of a stage's parameters and of its computation."""

    parameters: torch.dtype
    autocast: torch.dtype | None = None
    """The type of autocast; None turns it off."""

    @classmethod
    def of(cls, dtype: str) -> Precision:
        """Read a job's `dtype`."""
        named: torch.dtype = getattr(torch, dtype)
        if named in (torch.float32, torch.float64):
            return cls(parameters=named)
        return cls(parameters=torch.float32, autocast=named)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients need a loss scale, so that they do not underflow."""
        # float16 has five bits of exponent; bfloat16 has as many as float32.
        return self.autocast == torch.float16
