"""The values of a script that workers get once, to tell whether a callback changes one of them."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from oobleck.training.model import unwrapped

_HANDED_OVER = (
    *("args", "train_dataset", "eval_dataset", "data_collator", "compute_loss_func", "label_smoother"),
    *("optimizer", "lr_scheduler", "optimizer_cls_and_kwargs"),
)
_PLAIN = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_NAMES_IN_CONFIG = frozenset(
    {"_name_or_path", "architectures", "id2label", "label2id", "name_or_path", "transformers_version", "use_cache"}
)
"""Values of a configuration that no pass of training reads."""


def handed_over(trainer: Any) -> dict[str, object]:
    """Return the script's values that workers use, by names; objects of which only the identity counts with it."""
    model = unwrapped(trainer.model)
    owners: dict[str, object] = {name: getattr(trainer, name, None) for name in _HANDED_OVER}
    known: dict[str, object] = {name: _identity(owner) for name, owner in owners.items()}
    for name, parameter in model.named_parameters():
        hooks = [_hooks_in(parameter, kind) for kind in _HOOKS_OF_PARAMETERS]
        known[f"the parameter {name}"] = (id(parameter), parameter._version, parameter.requires_grad, hooks)
    for name, buffer in model.named_buffers():
        known[f"the buffer {name}"] = (id(buffer), 0 if buffer.is_inference() else buffer._version)
    for name, module in model.named_modules():
        path = f"model.{name}".removesuffix(".")
        owners[path] = module
        known[path] = _identity(module)
        known[f"the hooks on {path}"] = [_hooks_in(module, kind) for kind in _HOOKS]
        known |= {
            f"{path}.{attribute}": _identity(value) for attribute, value in vars(module).items() if callable(value)
        }
    known["torch's hooks on all modules"] = [_hooks_in(nn.modules.module, f"_global{kind}") for kind in _HOOKS]
    for what, owner in owners.items():
        values = getattr(owner, "__dict__", {})
        known |= {f"{what}.{name}": value for name, value in values.items() if isinstance(value, _PLAIN)}
    return known | _values_of("model.config", getattr(model, "config", None))


def _identity(value: object) -> tuple[int, object]:
    return id(value), value  # held, so that no other takes its address


def _hooks_in(owner: object, kind: str) -> list[tuple[int, object]]:
    return [_identity(hook) for hook in (getattr(owner, kind, None) or {}).values()]


def _values_of(name: str, config: object) -> dict[str, object]:
    known: dict[str, object] = {}
    for key, value in getattr(config, "__dict__", {}).items():
        if isinstance(value, PreTrainedConfig):
            known |= _values_of(f"{name}.{key}", value)
        elif key not in _NAMES_IN_CONFIG:
            known[f"{name}.{key}"] = value if isinstance(value, _PLAIN) else repr(value)
    return known
