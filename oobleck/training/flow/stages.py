"""A stage of a traced model: runs the model's own code up to its last unit, on what has travelled from stages before.

Units of earlier layers return what has travelled, or, where nothing of this stage depends on that, memory of the right
size without a meaning. The code ends with the stage's last unit, or with the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from oobleck.errors import ConfigError, UncutModel
from oobleck.training.randomness import MicrobatchKey, derive_seed, drawing_alike, generators_of, seed_device

from .flow import Flow, Ref, Result
from .parcels import Parcel, Size, dtype_of, size_of
from .units import constant_parameters, trial_of, uncut_model

_PROOF_KEY = MicrobatchKey(seed=0, step=1, microbatch=0)
_TOLERANCE = 1e-5
"""By how much the loss of a cut model may differ, as a share of it: sums may have another order."""


class StageIsDone(BaseException):  # no error: a model's own code must not catch it
    """Ends a forward pass after the stage's last unit."""


class FlowModules:
    """All modules of a traced model, of which those of one chunk of layers compute at a time; none at first."""

    def __init__(self, model: nn.Module, flow: Flow, *, device: torch.device, draws_at_random: bool) -> None:
        self.by_name = dict(model.named_modules(remove_duplicate=False))
        self.chunk = range(0)
        self.is_tried = False
        self._flow = flow
        self._device = device
        self._draws_at_random = draws_at_random
        self._key: MicrobatchKey | None = None
        self._at = 0
        self._is_inside = False
        self._values: dict[int, torch.Tensor] = {}
        self._sizes: dict[int, Size] = {}
        self._garbage: dict[Size, torch.Tensor] = {}
        self._units = {call.module: self.by_name[call.module] for call in flow.calls}
        self._before = {root: vars(module).get("forward") for root, module in self._units.items()}
        for root, module in self._units.items():
            module.forward = self._standing_in(root, module.forward)
        heard = sorted({name for call in flow.calls for name, _ in call.echoes})
        self._hooks = [self.by_name[name].register_forward_hook(self._hearing(name)) for name in heard]

    def remove(self) -> None:
        """Leave the model as it was before."""
        for root, module in self._units.items():
            if (before := self._before[root]) is None:
                del module.__dict__["forward"]
            else:
                module.forward = before
        for hook in self._hooks:
            hook.remove()

    def of_layer(self, layer: int) -> tuple[nn.Module, ...]:
        return tuple(self.by_name[root] for root in self._flow.roots_of(layer))

    @property
    def is_first(self) -> bool:
        return self.chunk.start == 0

    @property
    def is_last(self) -> bool:
        return self.chunk.stop == self._flow.num_layers

    def put_in_place(self, chunk: range) -> None:
        self.chunk = chunk

    def forget_traces(self) -> None:
        self._garbage.clear()

    @contextmanager
    def running(self, received: Parcel | None, key: MicrobatchKey) -> Iterator[None]:
        """Within the block, the model's code runs the chunk on what it has received, and raises StageIsDone after."""
        self._key, self._at, self._is_inside = key, 0, False
        self._values, self._sizes = {}, {}
        self._garbage.clear()
        if received is not None:
            # A microbatch of nothing has no tensors.
            self._values = dict(zip(self._flow.travelling[self.chunk.start], received.tensors, strict=False))
            self._sizes = dict(zip(self._flow.known_before(self.chunk.start), received.sizes, strict=True))
        try:
            yield
            if self.is_last and self._at != len(self._flow.calls):
                raise self._deviation(f"ends before {self._flow.calls[self._at].module}")
        finally:
            self._key = None
            self._values, self._sizes = {}, {}

    def sent(self) -> Parcel:
        """Return what travels to the layer after the chunk; to be called within `running`."""
        layer, flow = self.chunk.stop, self._flow
        tensors = tuple(self._values[each] for each in flow.travelling[layer])
        return Parcel(tensors, flow.carries(layer), tuple(self._sizes[each] for each in flow.known_before(layer)))

    def nothing(self) -> Parcel:
        """Return what travels of a microbatch without samples."""
        known = self._flow.known_before(self.chunk.stop)
        return Parcel((), (), tuple((0,) * (1 + self._flow.values[each].num_dimensions) for each in known))

    def loss_in(self, chunks: Sequence[range], compute_loss: Callable[[], torch.Tensor]) -> float:
        """Return the loss that chunks, which are all of the model, compute one after the other."""
        parcel: Parcel | None = None
        for chunk in chunks:
            self.put_in_place(chunk)
            with drawing_alike(0), self.running(parcel, _PROOF_KEY):
                try:
                    loss = compute_loss()
                except StageIsDone:
                    parcel = self.sent()
        return float(loss)

    # --- units ---

    def _standing_in(self, root: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or self._key is None:
                return forward(*args, **kwargs)
            at, calls = self._at, self._flow.calls
            if at >= len(calls) or calls[at].module != root:
                raise self._deviation(f"calls {root}")
            self._at += 1
            first, stop = (self._first_call(layer) for layer in (self.chunk.start, self.chunk.stop))
            if at < first:
                for name, result in calls[at].echoes:
                    self._echo(self.by_name[name], result.built(self._value))
                return calls[at].result.built(self._value)
            self._is_inside = True
            try:
                with self._drawing(at):
                    output = forward(*args, **kwargs)
            finally:
                self._is_inside = False
            output = self._noted(calls[at].result, output, root)
            if at == stop - 1 and not self.is_last:
                raise StageIsDone
            return output

        return run

    def _hearing(self, name: str) -> Callable[..., None]:
        """Make the hook that keeps what a module within a unit returns, where hooks pass it on."""

        def hear(_module: nn.Module, _args: object, output: Any) -> None:
            if not self._is_inside:
                return
            for known, result in self._flow.calls[self._at - 1].echoes:
                if known == name:
                    self._noted(result, output, name)

        return hear

    @staticmethod
    def _echo(module: nn.Module, output: Any) -> None:
        """Have a module's hooks hear what it has returned on another stage."""
        before = vars(module).get("forward")
        module.forward = lambda *_args, **_named: output
        try:
            module()
        finally:
            if before is None:
                del module.__dict__["forward"]
            else:
                module.forward = before

    def _first_call(self, layer: int) -> int:
        starts = self._flow.starts
        return starts[layer] if layer < len(starts) else len(self._flow.calls)

    def _noted(self, result: Result, output: Any, root: str) -> Any:
        leaves, spec = torch.utils._pytree.tree_flatten(output)
        if spec != result.spec:
            raise self._deviation(f"has {root} return something else")
        for at, (known, leaf) in enumerate(zip(result.leaves, leaves, strict=True)):
            if not isinstance(known, Ref):
                continue
            value = self._flow.values[known.value]
            if not isinstance(leaf, torch.Tensor) or leaf.ndim != value.num_dimensions:
                raise self._deviation(f"has {root} return something else")
            if known.value not in self._values:
                self._values[known.value] = leaf
                self._sizes[known.value] = size_of(leaf)
                if value.is_changed:
                    leaves[at] = leaf.clone()  # what travels is what the unit has returned
        return torch.utils._pytree.tree_unflatten(leaves, spec)

    def _value(self, number: int) -> torch.Tensor:
        """Return a value of an earlier layer as it has travelled, or memory of its size."""
        if (known := self._values.get(number)) is not None:
            return known.clone() if self._flow.values[number].is_changed else known
        size = self._sizes[number]
        if size not in self._garbage:
            self._garbage[size] = torch.zeros(size[1:], dtype=dtype_of(size), device=self._device)
        return self._garbage[size]

    @contextmanager
    def _drawing(self, at: int) -> Iterator[None]:
        """Seed what a unit draws by its call, and leave what the model's own code draws as on every other stage."""
        if not self._draws_at_random:
            yield
            return
        assert self._key is not None
        generators = (torch.default_generator, *generators_of(self._device))
        before = [generator.get_state() for generator in generators]
        seed = derive_seed(self._key.seed, "forward", self._key.step, self._key.microbatch, at)
        for device in {torch.device("cpu"), self._device}:
            seed_device(device, seed)
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)

    def _deviation(self, how: str) -> ConfigError:
        return ConfigError(
            f"model: its forward pass {how}, which it did not with the first samples: a model whose modules run for "
            "some samples alone has to be kept whole; set num_stages to 1"
        )


def prove_cuts(model: nn.Module, flow: Flow, losses: Sequence[Callable[[], torch.Tensor]]) -> None:
    """Cut a model between all of its layers, and compare its losses with those of one stage that has all.

    Each of `losses` runs the model, which has its real parameters, on samples of its own. Costs a forward pass or two
    for each, and the model's own code once a layer. Raises UncutModel where a loss differs, and
    ConfigError for a model that changes its parameters.
    """
    device = next(model.parameters()).device
    with constant_parameters(model), trial_of(model), torch.no_grad():
        modules = FlowModules(model, flow, device=device, draws_at_random=True)
        try:
            for at, loss in enumerate(losses):
                model.train(at < len(losses) - 1 or len(losses) == 1)  # evaluations run other code
                whole, cut = modules.loss_in((range(flow.num_layers),), loss), modules.loss_in(_all(flow), loss)
                if abs(whole - cut) > _TOLERANCE * max(1.0, abs(whole)):
                    raise uncut_model(model, f"its loss is {cut:g} in pieces, and {whole:g} as a whole")
        except UncutModel:
            raise
        # A model's own code may fail in any way without its modules.
        except Exception as error:
            why = f"it does not run in pieces ({' '.join(str(error).split())[:200]})"
            raise uncut_model(model, why) from error
        finally:
            modules.remove()


def _all(flow: Flow) -> tuple[range, ...]:
    return tuple(range(layer, layer + 1) for layer in range(flow.num_layers))
