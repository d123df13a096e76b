"""Ties, buffers, hooks and references of a model, read from its objects; refused by name where they cannot be trained.

A script may have tied a model's head, shared a module between two blocks, or put a hook on a parameter after the
configuration was made. So only the identity of tensors counts here, never what a configuration declares.
"""

from __future__ import annotations

import dis
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from oobleck.errors import ConfigError
from oobleck.training.counters import changed_since, counter_of, states_of
from oobleck.training.flow import persistent_buffers

_REGISTERED = ("_parameters", "_buffers", "_modules")
_MOST_TRIED = 1 << 22
"""Elements. A hook on a larger parameter is tried on its first real gradient, not before launch."""


def shared_tensors(model: nn.Module, declared: Mapping[str, str]) -> dict[str, str]:
    """Return the canonical name of each parameter and persistent buffer that is the same object as another."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_state(model):
        names.setdefault(id(tensor), []).append(name)
    shared: dict[str, str] = {}
    for group in names.values():
        # A declared name is the one that the model's files have.
        home = next((declared[name] for name in group if declared.get(name) in group), group[0])
        shared |= {name: home for name in group if name != home}
    return shared


def named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters and persistent buffers, once under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, buffer in persistent_buffers(module):
            yield full_name(path, attribute), buffer


def full_name(path: str, attribute: str) -> str:
    """Return the name of an attribute of the module called `path`, which is empty for the model itself."""
    return f"{path}.{attribute}" if path else attribute


# --- buffers that are saved with the model ---------------------------------------------------------------------


def require_constant_buffers(model: nn.Module, run: Callable[[], object]) -> None:
    """Raise ConfigError that names a persistent buffer which `run`, a forward pass of the model, changes."""
    before = {
        (path, attribute): (buffer, buffer._version)
        for path, module in model.named_modules()
        for attribute, buffer in persistent_buffers(module)
    }
    if not before:
        return
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True  # it would print errors that are expected here
    try:
        run()
    # The model's own code may read the values of fake tensors, and then fail in any way. That proves nothing; stages
    # check their real passes.
    except Exception:  # noqa: BLE001
        return
    finally:
        log.disabled = False
    for (path, attribute), (buffer, version) in before.items():
        # Torch counts changes in place; a buffer that the pass replaces is another object.
        now = model.get_submodule(path)._buffers.get(attribute)
        if now is not buffer or buffer._version != version:
            raise changed_buffer(full_name(path, attribute), model=type(model).__name__)


def changed_buffer(name: str, *, model: str) -> ConfigError:
    """Return the error for a buffer that a forward pass of a model of this class changes."""
    return ConfigError(
        f"model: in {model}, a forward pass changes the buffer {name}, which is saved with the model: microbatches are "
        "spread over nodes, and no node would see all of them; leave the update out, or use a module without statistics"
    )


# --- hooks on parameters ---------------------------------------------------------------------------------------


class GradientHook:
    """A hook on a parameter, as `Tensor.register_hook` takes it, which must be linear, and the same in every call."""

    def __init__(self, parameter: str, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._parameter = parameter
        self._hook = hook
        self._is_tried = False

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the hook's result for a gradient. Raises ConfigError for a hook that `try_out` refuses."""
        if not self._is_tried:
            self.try_out(gradient)
        return self._result(gradient).to(gradient.dtype)

    @torch.no_grad()
    def try_out(self, like: torch.Tensor) -> None:
        """Raise ConfigError if the hook is not linear on random gradients of this shape, or goes by its calls."""
        self._is_tried = True
        generator = torch.Generator().manual_seed(0)
        dtype = torch.promote_types(like.dtype, torch.float32)
        owners = {f"the hook on {self._parameter}": self._hook}
        before = states_of(owners)
        first, second = (torch.randn(like.shape, generator=generator).to(like.device, dtype) for _ in range(2))
        one, two, both = (self._result(each).double() for each in (first, second, 2 * first + second))
        # It runs before gradients are summed over microbatches, and over stages where the parameter is tied. Only a
        # linear hook (a mask, a factor) gives the same sums.
        if not torch.allclose(2 * one + two, both, rtol=1e-3, atol=1e-5):
            raise ConfigError(
                f"model: the hook on {self._parameter} is not linear: gradients are summed over microbatches and nodes "
                "after it, so it must give the same for a sum as for its parts (a mask or a factor does); leave it "
                "out, or set max_grad_norm"
            )

        # Most hooks keep nothing, and need no further calls.
        if not changed_since(owners, before):
            return
        counter = counter_of(
            owners, lambda: torch.allclose(self._result(first).double(), one, rtol=1e-6, equal_nan=True)
        )
        if counter is not None:
            raise ConfigError(
                f"model: the hook on {self._parameter} returns something else later, as it goes by {counter}, "
                "which changes with every call: nodes call it for each microbatch, and again after a failure; leave "
                "the count out, or freeze the parameter (requires_grad_(False)) for a run of its own"
            )

    def _result(self, gradient: torch.Tensor) -> torch.Tensor:
        result = self._hook(gradient.clone())  # it may change its argument in place
        if not isinstance(result, torch.Tensor) or result.shape != gradient.shape:
            raise ConfigError(
                f"model: the hook on {self._parameter} returns no gradient: it runs on nodes, and the script would not "
                "see anything that it records; leave it out, or have it return a gradient of the same shape"
            )
        return result


def gradient_hooks(model: nn.Module) -> dict[str, tuple[GradientHook, ...]]:
    """Return the hooks on trained parameters, keyed by every name that a parameter has.

    Raises ConfigError for hooks that training cannot support.
    """
    # Tensors are hashed by identity, so a tied parameter has one entry.
    hooks = {parameter: _hooks_on(name, parameter) for name, parameter in model.named_parameters()}
    return {name: hooks[each] for name, each in model.named_parameters(remove_duplicate=False) if hooks[each]}


def _hooks_on(name: str, parameter: nn.Parameter) -> tuple[GradientHook, ...]:
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ConfigError(
            f"model: {name} has a hook that runs once its gradient is accumulated; gradients are summed over nodes "
            "after that, so leave it out (register_post_accumulate_grad_hook), and leave steps to the optimizer"
        )
    hooks = tuple(GradientHook(name, hook) for hook in (parameter._backward_hooks or {}).values())
    if parameter.requires_grad and parameter.numel() <= _MOST_TRIED:
        for hook in hooks:
            hook.try_out(parameter)
    return hooks if parameter.requires_grad else ()


# --- what cannot be trained ------------------------------------------------------------------------------------


def require_trainable(model: nn.Module) -> None:
    """Raise ConfigError that names the first part of a script's model that stages could not copy faithfully."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        _require_plain(name, parameter)
    _require_memory_of_their_own(model)
    references = _References(model, parameters)
    for path, module in model.named_modules():
        references.refuse_those_of(path or type(module).__name__, module)


def require_no_hooks(model: nn.Module) -> None:
    """Raise ConfigError for a hook on a parameter of a model that is built without memory."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"model: {name} has a hook, and a job()'s model is made without values, on the meta device; train it "
                "by oobleck.transformers.Trainer, or leave the hook out"
            )


def require_one_type(model: nn.Module) -> None:
    """Raise ConfigError for a float32 or float64 model with a parameter of another type.

    Workers keep all parameters in one type. That of a model in half precision is float32 (docs/training.md), so one
    that keeps some in float32 is trained as it is.
    """
    types = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    usual = next(iter(types.values()), None)
    if usual not in (torch.float32, torch.float64):
        return
    for name, kind in types.items():
        if kind != usual:
            raise ConfigError(
                f"model: {name} is of {kind}, and other parameters are of {usual}: workers compute with parameters of "
                f"one type; convert the model with to({usual}), or all of it to {kind}"
            )


def require_independent_samples(model: nn.Module) -> None:
    """Raise ConfigError for a module that combines the samples of a batch, which are spread over nodes."""
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"model: in {type(model).__name__}, {path} is a {type(module).__name__}: its statistics are those of a "
                "whole batch, and batches are cut into microbatches over nodes; replace it by LayerNorm or GroupNorm"
            )


def _require_plain(name: str, parameter: nn.Parameter) -> None:
    if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
        kind = type(parameter.data if type(parameter) is nn.Parameter else parameter).__name__
        raise ConfigError(
            f"model: {name} is a {kind}, which cannot be spread over nodes; load the model without quantization, and "
            "not as part of another framework's"
        )
    if not parameter.dtype.is_floating_point:
        raise ConfigError(
            f"model: {name} is of {parameter.dtype}, which cannot be trained; load the model without quantization"
        )


def _require_memory_of_their_own(model: nn.Module) -> None:
    # Training one of two tensors over the same memory would overwrite the other.
    unique = {id(tensor): (name, tensor) for name, tensor in reversed([*named_state(model)])}
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _reach(tensor) * tensor.element_size(), name)
        for name, tensor in unique.values()
        if tensor.device.type != "meta" and tensor.numel() and tensor.layout == torch.strided
    )
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            raise ConfigError(
                f"model: {one} and {other} are two tensors over the same memory; make them one object, which ties them "
                "(`model.lm_head.weight = model.model.embed_tokens.weight`), or copy one of them (clone)"
            )


def _reach(tensor: torch.Tensor) -> int:
    """Count the elements from a tensor's first to its last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _References:
    """Finds functions and attributes that refer to a part of the model, of which stages have copies."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._own = {id(tensor): name for name, tensor in reversed([*parameters.items()])}
        self._modules = {id(module): path or type(module).__name__ for path, module in model.named_modules()}

    def refuse_those_of(self, place: str, module: nn.Module) -> None:
        """Raise ConfigError if the module called `place` refers to the original of a part."""
        for what, function in _functions_of(module):
            for value in _reached_by(function):
                if (name := self._name_of(value)) is not None:
                    raise ConfigError(
                        f"model: {what} of {place} reaches {name} by itself, and nodes have copies of the model: use "
                        "the module that it receives, or make it a method of that module"
                    )
        for attribute, value in vars(module).items():
            # Torch keeps a recurrent module's parameters in order as well, and looks them up again where they change.
            if attribute in _REGISTERED or (isinstance(module, nn.RNNBase) and attribute == "_flat_weights"):
                continue
            for each in _flat(value):
                if isinstance(each, torch.Tensor) and id(each) in self._own:
                    raise ConfigError(
                        f"model: {place}.{attribute} keeps the parameter {self._own[id(each)]} without being one; "
                        "assign the parameter itself to an attribute of the module, which ties the two"
                    )

    def _name_of(self, value: object) -> str | None:
        if isinstance(value, nn.Module) and id(value) not in self._modules:
            # A wrapper around the model is no part of it, and still leads to its parameters.
            holds_ours = any(id(parameter) in self._own for parameter in value.parameters())
            return type(value).__name__ if holds_ours else None
        return self._own.get(id(value)) or self._modules.get(id(value))


def _functions_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's hooks, and the functions that replace its methods."""
    for kind, word in (
        ("_forward_pre_hooks", "a forward pre-hook"),
        ("_forward_hooks", "a forward hook"),
        ("_backward_pre_hooks", "a backward pre-hook"),
        ("_backward_hooks", "a backward hook"),
    ):
        for hook in getattr(module, kind).values():
            yield word, hook
    for attribute, value in vars(module).items():
        if isinstance(value, types.FunctionType):
            yield f"the function {attribute}", value


def _reached_by(function: Any, depth: int = 0) -> Iterator[object]:
    """Yield the objects that a function reaches other than through its arguments: by closures and globals."""
    # Methods and `functools.partial` are copied along with the model, and so are the objects that they hold.
    if not isinstance(function, types.FunctionType):
        return
    names = {each.argval for each in dis.get_instructions(function) if each.opname == "LOAD_GLOBAL"}
    held = [function.__globals__[name] for name in sorted(names) if name in function.__globals__]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # the cell is empty
            continue
    for value in (*held, *(function.__defaults__ or ())):
        yield from _flat(value)
        # Functions may refer to each other in a circle.
        if isinstance(value, types.FunctionType) and depth < 2:
            yield from _reached_by(value, depth + 1)


def _flat(value: object) -> Iterator[object]:
    yield value
    match value:
        case list() | tuple() | set():
            yield from value
        case dict():
            yield from value.values()
