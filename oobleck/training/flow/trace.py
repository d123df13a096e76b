"""What flows between the modules of a model: found by following every tensor of one real forward pass.

The units of a model are its blocks (the members of its lists of modules) and whatever else holds parameters. Between
them runs the model's own code, which every stage runs itself. The trace finds which results of which units each unit
reads, through that code or not, so it finds what has to travel over a cut: encoders, towers, pairs, router losses and
heads that read an earlier module need no code of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from oobleck.training.randomness import drawing_alike

from .flow import Call, Flow, Ref, Result, Value
from .units import calls_of_modules, layer_starts, trial_of, uncut_model, units_of


def trace_flow(model: nn.Module, compute_loss: Callable[[], torch.Tensor]) -> Flow:
    """Follow the tensors of one forward pass in training mode, with the model's real parameters.

    Runs the model twice, on what `compute_loss` gives it. Raises UncutModel with the reason where it has to stay whole.
    """
    with trial_of(model):
        counts = calls_of_modules(model, compute_loss)
        units, blocks = units_of(model, counts)
        if len(units) < 2:
            raise uncut_model(model, "it has no list of modules that run one after the other")
        tracker = _Tracker(model, units)
        with drawing_alike(0), tracker.following(), torch.autograd.graph.saved_tensors_hooks(_forget, _forget):
            loss = compute_loss()
            tracker.conclude(loss)
    starts = layer_starts(model, [call.module for call in tracker.calls], blocks)
    if len(starts) < 2:
        raise uncut_model(model, "its modules are one layer")
    return Flow(
        calls=tuple(tracker.calls),
        values=tuple(tracker.values),
        loss_reads=tracker.loss_reads,
        loss_parameters=tracker.loss_parameters,
        blocks=frozenset(blocks),
        starts=tuple(starts),
    )


def _forget(_tensor: object) -> Any:
    return None  # nothing runs backward


_Source = int | str
"""What a tensor depends on: a value (from 0), something within a call (-1 for the first), or a parameter's name."""


class _Reads(TorchFunctionMode):
    """Notes what Python reads of tensors past the dispatcher."""

    _READ = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._READ:
            self._note(args[0])
        return func(*args, **(kwargs or {}))


class _Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Follows tensors by their memory: which values and parameters each depends on."""

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.loss_reads: frozenset[int] = frozenset()
        self.loss_parameters: frozenset[str] = frozenset()
        self._model = model
        self._units = units
        self._inside: int | None = None
        self._own: frozenset[str] = frozenset()
        self._read: set[_Source] = set()
        """What the call under way reads, or whatever follows."""
        self._steady: set[_Source] = set()
        """What Python has read, on which everything later may depend."""
        self._taints: dict[int, tuple[StorageWeakRef, frozenset[_Source]]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, int]] = {}
        """The tensors of values, by id, with the values' numbers."""
        self._homes: dict[int, list[int]] = {}
        """The values in a piece of memory."""
        self._inner: dict[int, list[_Inner]] = {}
        """What modules within calls have returned, keyed by call."""
        self._names = {id(each): name for name, each in reversed([*model.named_parameters(remove_duplicate=False)])}
        for name, parameter in model.named_parameters():
            self._set(parameter, frozenset({name}))

    @contextmanager
    def following(self) -> Iterator[None]:
        reads = _Reads(self._note_read)
        handles = []
        before: dict[str, Any] = {name: vars(module).get("forward") for name, module in self._units.items()}
        try:
            for name, module in self._units.items():
                module.forward = self._followed(name, module, module.forward)
                handles += [
                    inner.register_forward_hook(self._noting(f"{name}.{path}"))
                    for path, inner in module.named_modules()
                    if path
                ]
            with self, reads:
                yield
        finally:
            for handle in handles:
                handle.remove()
            for name, module in self._units.items():
                if before[name] is None:
                    del module.__dict__["forward"]
                else:
                    module.forward = before[name]

    def conclude(self, loss: torch.Tensor) -> None:
        read = self._resolved(loss) | self._steady
        self.loss_reads = frozenset(each for each in read if isinstance(each, int))
        self.loss_parameters = frozenset(each for each in read if isinstance(each, str))
        for number, call in enumerate(self.calls):
            heard = tuple((each.module, each.result()) for each in self._inner[number] if each.heard)
            self.calls[number] = replace(call, echoes=heard)

    # --- calls ---

    def _followed(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        own = frozenset(self._names[id(each)] for each in module.parameters())

        def followed(*args: Any, **kwargs: Any) -> Any:
            if self._inside is not None:  # a unit within another
                return forward(*args, **kwargs)
            call = self._inside = len(self.calls)
            self._own, self._read = own, set(self._steady)
            self._inner[call] = []
            try:
                output = forward(*args, **kwargs)
            finally:
                self._inside = None
            self.calls.append(self._call(name, call, output))
            return output

        return followed

    def _call(self, name: str, call: int, output: Any) -> Call:
        result = self._result(name, call, output)
        return Call(
            module=name,
            result=result,
            reads=frozenset(each for each in self._read if isinstance(each, int)),
            parameters=frozenset(each for each in self._read if isinstance(each, str)),
        )

    def _result(self, name: str, call: int, output: Any) -> Result:
        leaves, spec = pytree.tree_flatten(output)
        named: list[object] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                named.append(Ref(self._value_of(leaf, name, call)))
            elif leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.Size):
                named.append(leaf)
            else:
                raise uncut_model(self._model, f"{name} returns a {type(leaf).__name__} beside tensors")
        return Result(spec, tuple(named))

    def _value_of(self, tensor: torch.Tensor, name: str, call: int) -> int:
        taint = self._taint(tensor)
        known = self._tensors.get(id(tensor))
        # What a block passes on as it has received it needs no second name.
        if known is not None and -1 - call not in taint:
            return known[1]
        number = len(self.values)
        place = sum(each.call == call for each in self.values)
        self.values.append(Value(call, place, f"{name}:{place}", tensor.ndim, tensor.requires_grad))
        # Several values may share memory, as parts of one tensor.
        self._set(tensor, (taint - {-1 - call}) | {number})
        self._tensors[id(tensor)] = (tensor, number)
        self._homes.setdefault(_place(tensor), []).append(number)
        return number

    # --- operations ---

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        result = func(*args, **kwargs)
        taint = frozenset[_Source]().union(*map(self._resolved, given))
        if self._inside is not None:
            self._read |= {each for each in taint if each != -1 - self._inside and each not in self._own}
        elif _decides(func, given):
            self._steady |= taint
        made = taint if self._inside is None else frozenset({-1 - self._inside})
        changed = self._changed(func, args, kwargs)
        places = {_place(each) for each in given}
        for each in pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor) and _place(each) not in places:
                self._set(each, made)
        for each in changed:
            self._note_change(each)
            self._set(each, self._taint(each) | made)
        return result

    def _changed(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        changed: list[torch.Tensor] = []
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            changed += [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
        return changed

    def _note_change(self, tensor: torch.Tensor) -> None:
        for number in self._homes.get(_place(tensor), ()):
            self.values[number] = replace(self.values[number], is_changed=True)

    def _note_read(self, tensor: torch.Tensor) -> None:
        taint = self._resolved(tensor)
        if self._inside is None:
            self._steady |= taint
        else:
            self._read |= {each for each in taint if each != -1 - self._inside and each not in self._own}

    # --- taints ---

    def _taint(self, tensor: torch.Tensor) -> frozenset[_Source]:
        found = self._taints.get(_place(tensor))
        return frozenset() if found is None else found[1]

    def _set(self, tensor: torch.Tensor, taint: frozenset[_Source]) -> None:
        # The weak reference keeps the place from being given to other memory.
        kept = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's own
        self._taints[_place(tensor)] = (kept, taint)

    def _resolved(self, tensor: torch.Tensor) -> frozenset[_Source]:
        """Return what a tensor depends on, in which what a hook has kept of another call's inside has become a value.

        Raises UncutModel for anything else of another call's inside.
        """
        taint = self._taint(tensor)
        for source in taint:
            if isinstance(source, int) and source < 0 and (self._inside is None or source != -1 - self._inside):
                taint = taint - {source} | {self._heard(-1 - source, tensor)}
                self._set(tensor, taint)
        return taint

    def _heard(self, call: int, tensor: torch.Tensor) -> int:
        """Return the value of what a module within a call has returned."""
        if call < len(self.calls):
            for inner in self._inner[call]:
                if (at := inner.place_of(tensor)) is not None:
                    number = inner.heard[at] = len(self.values)
                    self.values.append(
                        Value(call, number, f"{inner.module}:{at}", tensor.ndim, carries_gradient=tensor.requires_grad)
                    )
                    return number
            raise uncut_model(self._model, f"something reads within {self.calls[call].module}, past what it returns")
        raise uncut_model(self._model, "its modules run within each other")

    def _noting(self, name: str) -> Callable[..., None]:
        def note(_module: nn.Module, _args: object, output: Any) -> None:
            if self._inside is not None:
                self._inner[self._inside].append(_Inner.of(name, output))

        return note


@dataclass(frozen=True, slots=True)
class _Inner:
    """What a module within a call has returned, without its memory."""

    module: str
    spec: pytree.TreeSpec
    leaves: tuple[tuple[int, tuple[int, ...]] | None, ...]
    """The place and the shape of each tensor."""
    heard: dict[int, int]
    """The values that leaves have become."""

    @classmethod
    def of(cls, module: str, output: Any) -> _Inner:
        leaves, spec = pytree.tree_flatten(output)
        tensors = ((_place(each), tuple(each.shape)) if isinstance(each, torch.Tensor) else None for each in leaves)
        return cls(module, spec, tuple(tensors), {})

    def place_of(self, tensor: torch.Tensor) -> int | None:
        wanted = (_place(tensor), tuple(tensor.shape))
        return next((at for at, leaf in enumerate(self.leaves) if leaf == wanted), None)

    def result(self) -> Result:
        """Return what its hooks are to hear on other stages: what was read, and nothing else."""
        leaves = (Ref(self.heard[at]) if at in self.heard else None for at in range(len(self.leaves)))
        return Result(self.spec, tuple(leaves))


def _place(tensor: torch.Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def _decides(func: Any, given: list[torch.Tensor]) -> bool:
    """Say whether Python, or a shape, depends on the values that an operation reads."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    # Indices of integers choose values, and those of booleans a shape.
    return "index" not in func.__name__ or any(each.dtype == torch.bool for each in given)
