"""Measures what one microbatch costs in each layer, on this device, with the code that training runs.

Each layer is measured alone, so that a model much larger than the device can be profiled.
"""

from __future__ import annotations

import copy
import itertools
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from oobleck.job import CompileMode, Recompute
from oobleck.planner import DeviceProfile, LayerProfile, NetworkProfile, Profile, SplitBackward
from oobleck.planner.profiles import ASSUMED_COMMUNICATION_BYTES, LEVELS, LINKS, Recomputed
from oobleck.training import flow as flows
from oobleck.training import model as models
from oobleck.training.assembly import Assembly
from oobleck.training.data import Batch
from oobleck.training.model import ModelStructure, Precision, StageModel
from oobleck.training.optim import Optimizer
from oobleck.training.weight_gradients import WeightGradients

from .layer_pass import KEY, Carried, memory_of_pass, now_s, run_pass

_ASSUMED_NETWORK = NetworkProfile(
    inter_node_bytes_per_s=1e9,
    inter_node_latency_s=1e-4,
    intra_node_bytes_per_s=4e9,
    intra_node_latency_s=5e-5,
    assumed=LINKS,
)
"""10-gigabit Ethernet between nodes, and several times that within one, until a run has timed its links."""

_NUM_WARMUPS = 2
# So many runs at least, and more until they have taken a second: a machine that others use is fast and slow by turns.
_LEAST_RUNS, _MOST_RUNS = 5, 25
_ENOUGH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    forward_s: float
    backward_s: float
    split: SplitBackward | None
    activation_bytes: int
    cast_bytes: int
    """Copies of weights that autocast makes once for all microbatches."""
    transient_bytes: int
    context_bytes: int = 0
    update_s: float = 0.0
    recomputed: Mapping[str, Recomputed] = field(default_factory=dict)


@dataclass(slots=True)
class _Alone:
    """Stands for the other devices that share samples: what is sent to them comes back."""

    degree: int
    sent_bytes: int = 0

    def exchange(self, rows: torch.Tensor, _counts: Sequence[Sequence[int]]) -> torch.Tensor:
        self.sent_bytes += rows.nbytes * (self.degree - 1) // self.degree
        return rows.clone()


def measure_profile(
    structure: ModelStructure,
    *,
    microbatch_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    device_memory_bytes: int,
    autocast: torch.dtype | None = None,
    recompute: Recompute = "none",
    compiles: CompileMode | None = None,
    attention: str | None = None,
    splits: bool = False,
    optimizer: Optimizer | None = None,
    state_tensors: int = 2,
    communication_bytes: int = 0,
    whole: Batch | None = None,
    context_parallel: int = 1,
) -> Profile:
    """Measure what a microbatch of `microbatch_size` samples costs in each layer: the median of 5 to 25 runs.

    With `splits`, measure backward passes in two parts as well; with an `optimizer`, its updates. `state_tensors` is
    the number of tensors that it keeps for a parameter, each of the parameter's size; `communication_bytes` is what
    NCCL keeps on the device; `whole` is a microbatch for a model that is kept whole. Where `context_parallel` devices
    share a microbatch, the profile is that of one of them, which measures no exchange.

    The memory in use at any time is one layer with its gradients and activations. Changes the state of the device's
    generator.
    """
    sequence_length = structure.sequence_length
    sample = _batch(structure, microbatch_size) if whole is None else whole
    alone = _Alone(context_parallel)
    if context_parallel > 1:
        structure = replace(structure, sequence_length=sequence_length // context_parallel)
        sample = sample.part(context_parallel - 1, context_parallel)
    stage = StageModel(
        structure,
        dtype=dtype,
        device=device,
        autocast=autocast,
        recompute=recompute,
        compiles=compiles,
        attention=attention,
    )
    if context_parallel > 1:
        models.share_contexts(stage, models.ContextShare(0, context_parallel, context_parallel, alone))
    batch = sample.to(stage.device)
    received: Carried | None = _hidden_states(structure, batch, stage) if structure.flow is None else None
    hidden_bytes = microbatch_size * structure.sequence_length * structure.hidden_size * stage.hidden_dtype.itemsize
    measured: dict[object, _Cost] = {}
    layers = []
    for layer, name in enumerate(structure.layer_names):
        # Blocks that share class, shapes and kind of attention cost the same.
        kind = structure.layer_kind(layer)
        if kind not in measured:
            cost = _measure(stage, layer, batch, received, compiles=compiles is not None, splits=splits)
            cost = _with_levels(stage, layer, batch, received, cost, is_auto=recompute == "auto")
            measured[kind] = replace(
                cost,
                context_bytes=_sent_bytes(stage, layer, batch, received, alone),
                update_s=0.0 if optimizer is None else _update_s(stage, layer, optimizer),
            )
        cost = measured[kind]
        output_bytes = 0 if layer == structure.num_layers - 1 else hidden_bytes
        if structure.flow is not None:
            received, output_bytes = _passed_on(stage, layer, batch, received)
        layers.append(_layer_profile(stage, layer, name, cost, output_bytes=output_bytes, state_tensors=state_tensors))
    return Profile(
        model=structure.config.model_type,
        microbatch_size=microbatch_size,
        sequence_length=sequence_length,
        layers=tuple(layers),
        device=DeviceProfile(
            name=device_name(stage.device), memory_bytes=device_memory_bytes, communication_bytes=communication_bytes
        ),
        network=_ASSUMED_NETWORK,
    )


def _layer_profile(
    stage: StageModel, layer: int, name: str, cost: _Cost, *, output_bytes: int, state_tensors: int
) -> LayerProfile:
    structure, itemsize, on_gpu = stage.structure, stage.dtype.itemsize, stage.device.type == "cuda"
    elements = _num_elements(structure, structure.layer_parameters(layer))
    trained = _num_elements(structure, structure.trained_parameters(layer))
    return LayerProfile(
        name=name,
        forward_s={1: cost.forward_s},
        backward_s={1: cost.backward_s},
        param_bytes=elements * itemsize,
        frozen_bytes=(elements - trained) * itemsize,
        optimizer_bytes=trained * itemsize * state_tensors,
        activation_bytes=cost.activation_bytes,
        output_bytes=output_bytes,
        update_s=cost.update_s,
        split=cost.split,
        recomputed=cost.recomputed,
        # Copies of gradients and messages in transit are counted on GPUs only.
        copy_bytes=cost.cast_bytes + (trained * itemsize if on_gpu else 0),
        transient_bytes=cost.transient_bytes,
        message_bytes=output_bytes if on_gpu else 0,
        context_bytes=cost.context_bytes,
    )


def _num_elements(structure: ModelStructure, parameters: Iterable[str]) -> int:
    return sum(structure.shapes[parameter].numel() for parameter in parameters)


def profile_of_job(assembly: Assembly, *, device_memory_bytes: int, owns_device: bool = True) -> Profile:
    """Measure all layers of a job's model as its workers run them; `owns_device` if no two workers share a device."""
    job, structure, optimizer = assembly.job, assembly.structure, assembly.optimizer
    precision = Precision.of(job.dtype)
    device = torch.device(job.device)
    profile = measure_profile(
        structure,
        microbatch_size=job.microbatch_size,
        dtype=precision.parameters,
        device=device,
        device_memory_bytes=device_memory_bytes,
        autocast=precision.autocast,
        recompute=job.recompute,
        compiles=job.compiles,
        attention=job.attn_implementation,
        splits=job.may_split_backward,
        optimizer=optimizer,
        state_tensors=optimizer.layout(device).num_tensors,
        communication_bytes=bytes_of_nccl(device, owns_device=owns_device),
        whole=assembly.train.largest_batch(job.microbatch_size) if structure.whole_loss is not None else None,
        context_parallel=job.context_parallel,
    )
    experts = models.share_for(job, structure, rank=0).experts
    return _with_experts(
        profile, structure, frozenset().union(*experts.values()), itemsize=precision.parameters.itemsize
    )


def _with_experts(profile: Profile, structure: ModelStructure, parameters: frozenset[str], *, itemsize: int) -> Profile:
    """Return a profile that knows the parameters of experts that stay on the devices of a sharded stage."""

    def with_own(index: int, layer: LayerProfile) -> LayerProfile:
        elements = _num_elements(structure, parameters.intersection(structure.layer_parameters(index)))
        messages = layer.output_bytes * models.experts_per_token(structure) if elements else 0
        return replace(layer, expert_bytes=elements * itemsize, expert_message_bytes=messages)

    return replace(profile, layers=tuple(itertools.starmap(with_own, enumerate(profile.layers))))


def bytes_of_nccl(device: torch.device, *, owns_device: bool) -> int:
    """Return what NCCL is assumed to keep on a worker's device; 0 where the worker uses Gloo."""
    return ASSUMED_COMMUNICATION_BYTES if device.type == "cuda" and owns_device else 0


def _batch(structure: ModelStructure, batch_size: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, structure.sequence_length)
    ids = torch.randint(0, structure.config.vocab_size, shape, generator=generator)
    labels = ids
    if structure.task in ("sequence_classification", "token_classification"):
        labels = torch.zeros_like(ids)
    if structure.task == "sequence_classification":
        labels = labels[:, 0]
    return Batch(input_ids=ids, labels=labels, is_causal=structure.task == "causal_lm")


def _passed_on(stage: StageModel, layer: int, batch: Batch, received: Carried | None) -> tuple[Carried | None, int]:
    """Return what a layer of a traced model sends to the next, and its bytes."""
    if layer == stage.structure.num_layers - 1:
        return None, 0
    stage.adopt(layer, layer + 1, {})
    stage.initialize([layer], seed=0)
    with torch.no_grad():
        parcel = stage.carry(batch, received, num_items=max(1, batch.num_items), key=KEY)
    stage.adopt(0, 0, {})
    assert isinstance(parcel, flows.Parcel)
    return parcel, flows.num_bytes(parcel.tensors)


def _hidden_states(structure: ModelStructure, batch: Batch, stage: StageModel) -> torch.Tensor:
    """Return what the stage before would send."""
    shape = (*batch.input_ids.shape, structure.hidden_size)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return values.to(device=stage.device, dtype=stage.hidden_dtype)


def _measure(
    stage: StageModel, layer: int, batch: Batch, received: Carried | None, *, compiles: bool, splits: bool
) -> _Cost:
    """Measure a layer on what it receives, if it is not the first."""
    splits = splits and stage.structure.whole_loss is None
    stage.adopt(layer, layer + 1, {})
    stage.initialize([layer], seed=0)
    received = None if stage.is_first else received
    activation_bytes, cast_bytes, transient_bytes = memory_of_pass(stage, batch, received, compiles=compiles)
    put_off = WeightGradients()
    for module in stage.modules_of(layer):
        put_off.put_off(module)
    # Gradients stay between runs, because every backward pass but a step's first adds to them. The two ways alternate,
    # so that a load on the machine slows both.
    times: list[tuple[float, float]] = []
    parts: list[SplitBackward] = []
    for _ in _runs():
        times.append(run_pass(stage, batch, received))
        if splits:
            parts.append(_run_split(stage, batch, received, put_off))
    stage.adopt(0, 0, {})
    times, parts = times[_NUM_WARMUPS:], parts[_NUM_WARMUPS:]
    # The shortest would be that of a moment in which the machine's other workers, which measure too, left it most.
    split = None
    if splits:
        split = SplitBackward(
            forward_s=median(part.forward_s for part in parts),
            backward_input_s=median(part.backward_input_s for part in parts),
            backward_weight_s=median(part.backward_weight_s for part in parts),
            kept_bytes=max(part.kept_bytes for part in parts),
        )
    return _Cost(
        forward_s=median(forward for forward, _ in times),
        backward_s=median(backward for _, backward in times),
        split=split,
        activation_bytes=activation_bytes,
        cast_bytes=cast_bytes,
        transient_bytes=transient_bytes,
    )


def _runs() -> Iterator[int]:
    """Yield once for each run, those to warm up first, until there are enough of them."""
    yield from range(_NUM_WARMUPS)  # which may compile the layer
    begun_s = time.perf_counter()
    for number in range(_MOST_RUNS):
        if number >= _LEAST_RUNS and time.perf_counter() - begun_s > _ENOUGH_S:
            return
        yield number


def _with_levels(
    stage: StageModel, layer: int, batch: Batch, received: Carried | None, whole: _Cost, *, is_auto: bool
) -> _Cost:
    """Measure a block at each level of recomputation as well, if it is chosen; `whole` is what it costs without."""
    if not is_auto or not stage.structure.is_block(layer):
        return whole
    found = {}
    for level in LEVELS:
        stage.set_recomputation(layer, level)
        cost = _measure(stage, layer, batch, received, compiles=False, splits=False)
        found[level] = Recomputed(
            more_s={1: max(0.0, cost.forward_s + cost.backward_s - whole.forward_s - whole.backward_s)},
            activation_bytes=cost.activation_bytes,
            transient_bytes=cost.transient_bytes,
        )
    stage.set_recomputation(layer, "none")
    return replace(whole, recomputed=found)


@torch.no_grad()
def _sent_bytes(stage: StageModel, layer: int, batch: Batch, received: Carried | None, alone: _Alone) -> int:
    """Return what a forward pass of a layer sends to the devices that share its samples."""
    if not stage.computes_parts:
        return 0
    stage.adopt(layer, layer + 1, {})
    stage.initialize([layer], seed=0)
    before = alone.sent_bytes
    stage.carry(batch, None if stage.is_first else received, num_items=max(1, batch.num_items), key=KEY)
    stage.adopt(0, 0, {})
    return alone.sent_bytes - before


@torch.no_grad()
def _update_s(stage: StageModel, layer: int, optimizer: Optimizer) -> float:
    """Measure what follows the passes of a step: a layer's gradients are copied, their norm taken, and applied."""
    stage.adopt(layer, layer + 1, {})
    stage.initialize([layer], seed=0)
    trained = stage.trained_parameters
    own = copy.copy(optimizer)  # the worker's own has no parameters before its first plan
    own.adopt(stage.parameters)
    gradients = [torch.randn_like(parameter) for parameter in trained.values()]
    times = []
    for _ in _runs() if trained else ():
        start_s = now_s(stage.device)
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        float(torch.linalg.vector_norm(flat))
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
        own.step(1, dict(zip(trained, pieces, strict=True)), 0.5)
        times.append(now_s(stage.device) - start_s)
    stage.adopt(0, 0, {})
    return median(times[_NUM_WARMUPS:]) if times else 0.0


def _run_split(stage: StageModel, batch: Batch, received: Carried | None, put_off: WeightGradients) -> SplitBackward:
    put_off.engage(is_on=True)
    put_off.begin(0)
    forward_s, backward_input_s = run_pass(stage, batch, received)
    kept_bytes = put_off.kept_bytes
    start_s = now_s(stage.device)
    put_off.finish(0)
    backward_weight_s = now_s(stage.device) - start_s
    put_off.engage(is_on=False)
    return SplitBackward(
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        kept_bytes=kept_bytes,
    )


def device_name(device: torch.device) -> str:
    """Return the maker's name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
