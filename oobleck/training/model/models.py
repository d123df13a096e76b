"""The part of a model that one worker holds: any ranges of its layers, which may change at any time.

A stage keeps all modules of the model, without memory, and runs the model's own forward code. Layers held by other
workers are replaced (`stage_modules.py`): embeddings return zeros, all others are the identity. So every stage makes
masks and rotary tables itself, and only hidden states travel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.job import CompileMode, Recompute
from oobleck.planner import MAX_LOGITS
from oobleck.training.data import Batch, WholeBatch, mapped_tensors
from oobleck.training.dropout import turn_off_dropout
from oobleck.training.flow import Carried, FlowModules, Parcel, StageIsDone
from oobleck.training.randomness import MicrobatchKey, derive_seed, drawing_alike, generators_of

from . import forward_passes, losses
from .configuration import CAUSAL_LM_LOSS
from .forward_passes import check_attention, keep_casts, prepare_whole, use_attention, use_plain_experts
from .initialization import materialize_buffers, move_buffers
from .layered_model import LayeredModel, arguments_of
from .stage_modules import StageModules
from .stage_tensors import StageTensors, cast_in_blocks, convert_vacant, fill_vacant
from .structure import ModelStructure
from .token_shares import TokenShare


class StageModel:
    """Some layers of a model, in chunks of consecutive ones; none before the first `adopt`.

    Not safe for use by two threads at once. Takes the generator of its device for itself.
    """

    loss_scale: float = 1.0
    """The factor of all gradients, applied where they begin. The loss itself is returned unscaled."""
    computes_parts: bool = False
    """Whether batches have a part of each sample's tokens (`Batch.part`)."""

    def __init__(
        self,
        structure: ModelStructure,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        autocast: torch.dtype | None = None,
        recompute: Recompute = "none",
        compiles: CompileMode | None = None,
        attention: str | None = None,
        max_logits: int = MAX_LOGITS,
        cached: Collection[str] = (),
        casts_cached: bool = False,
    ) -> None:
        """`attention` is an implementation by transformers' name. Raises ConfigError where the model has none such.

        The standard loss of language models has at most `max_logits` at once. Parameters in `cached` have no memory
        unless others give it to them. With `casts_cached`, those that autocast would cast are of its type already, and
        so are their gradients.
        """
        self.structure = structure
        self.dtype = dtype
        self.autocast = autocast
        self.compiles = compiles
        self.device = torch.device(device)
        self.chunks: tuple[range, ...] = ()
        self.model = structure.build(dtype=dtype)
        """All modules of the model; those of layers held elsewhere have no memory."""
        convert_vacant(self.model, dtype)
        self.compute_loss = self._script_loss()
        """Replaces the model's own loss."""
        has_own_loss = structure.whole_loss is not None or "_loss_function" in vars(self.model)
        if dtype == torch.float64 and not has_own_loss and self.model.loss_type == CAUSAL_LM_LOSS:
            # The models' own loss converts the logits to float32, which would lose half of the digits.
            self.model.loss_function = losses.causal_lm_loss
        if dtype == torch.float64:
            use_plain_experts(self.model)
        self._max_logits = max_logits
        self._chunked: tuple[losses.ChunkedLoss | None] | None = None  # once it is known whether there is one
        self._vocabulary_share: losses.VocabularyShare | None = None
        self._casts_once = False
        self._tokens: TokenShare | None = None
        self._attention = attention
        if attention is not None:
            use_attention(self.model, attention)
        cached_types = dict.fromkeys(cached, dtype)
        if casts_cached and autocast is not None:
            cached_types |= dict.fromkeys(cached_types.keys() & cast_in_blocks(self.model, structure), autocast)
        if not structure.drops:
            turn_off_dropout(self.model)
        vacant = dict(self.model.named_parameters(remove_duplicate=False))
        self._trunk_takes = structure.takes
        if isinstance(self.model, PreTrainedModel) and structure.whole_loss is None:
            # A model with its head may take arguments that its trunk does not.
            self._trunk_takes &= arguments_of(type(self.model.base_model).forward)
        if structure.keeps_buffers:
            move_buffers(self.model, device=self.device)
        else:
            materialize_buffers(self.model, device=self.device)
        self._recomputing = {} if structure.is_whole else self._prepare_blocks(recompute, compiles)
        self._modules: StageModules | FlowModules
        if structure.flow is None:
            self._modules = StageModules(self.model, structure, device=self.device)
        else:
            vacant |= fill_vacant(self.model, device=self.device)
            draws = structure.draws_at_random and structure.drops
            self._modules = FlowModules(self.model, structure.flow, device=self.device, draws_at_random=draws)
        self._tensors = StageTensors(
            self.model,
            self._modules.by_name,
            structure,
            vacant=vacant,
            dtype=dtype,
            device=self.device,
            cached=cached_types,
        )
        if structure.is_whole:
            prepare_whole(self.model, recompute=recompute, compiles=compiles)

    def _prepare_blocks(
        self, recompute: Recompute, compiles: CompileMode | None
    ) -> dict[str, forward_passes.RecomputingBlock]:
        """Set up each block to be compiled, and to recompute; return those that may recompute."""
        recomputing: dict[str, forward_passes.RecomputingBlock] = {}
        draws = self.structure.draws_at_random
        for root in self.structure.blocks:
            module = self.model.get_submodule(root)
            if compiles is not None:
                forward_passes.compile_forward(module, compiles)
            if recompute != "none":
                recomputing[root] = forward_passes.RecomputingBlock(
                    module, level=recompute, draws_at_random=draws, computing=self._drop_casts
                )
        return recomputing

    # --- what it holds -------------------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters held, by canonical name, in the order of layers; a tied one once."""
        return dict(self._tensors.parameters)

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._tensors.parameters.items() if parameter.requires_grad}

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The type of the hidden states that the stage receives and returns, and so of their gradients."""
        return self.autocast or self.dtype

    @property
    def is_tried(self) -> bool:
        """Whether modules run to see what they do, and not for a microbatch."""
        return self._modules.is_tried

    def modules_of(self, layer: int) -> tuple[nn.Module, ...]:
        """Return the modules that make up a layer: one for a block."""
        return self._modules.of_layer(layer)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers held, in the model's order."""
        return tuple(chain.from_iterable(self.chunks))

    @property
    def is_first(self) -> bool:
        return self._modules.is_first

    @property
    def is_last(self) -> bool:
        return self._modules.is_last

    def adopt(self, first_layer: int, stop_layer: int, state: Mapping[str, torch.Tensor]) -> None:
        """Hold layers [first_layer, stop_layer) from now on, as one chunk of `adopt_chunks`; none if they are equal."""
        self.adopt_chunks((range(first_layer, stop_layer),), state)

    def adopt_chunks(self, chunks: Sequence[range], state: Mapping[str, torch.Tensor]) -> None:
        """Hold the layers of these chunks, in the model's order, from now on. Copies nothing on the device.

        Parameters that are held already stay the same objects, with their gradients. New ones become the tensors that
        `state` has under their names (it may have others), or not-a-number until they are set. Parameters of no held
        layer are released. O(layers); no forward pass may be in progress. Raises CorruptCheckpoint where `state` has
        another value for a buffer that every stage computes with.
        """
        self.chunks = tuple(chunk for chunk in chunks if chunk)
        ends = [0, *(end for chunk in self.chunks for end in (chunk.start, chunk.stop)), self.structure.num_layers]
        assert ends == sorted(ends), f"layers in the order of the model, each once: {chunks}"
        self._modules.forget_traces()
        self._tensors.hold(self.layers, state)
        self._modules.put_in_place(self.chunks[0] if self.chunks else range(0))

    def set_recomputation(self, layer: int, level: str) -> None:
        """Set what a block recomputes from its next forward pass on; see `RecomputingBlock`."""
        for block in self._recomputing_in(layer):
            block.level = level

    def recomputation(self, layer: int) -> str:
        """Return what a layer recomputes: none, selective or all."""
        return next((block.level for block in self._recomputing_in(layer) if block.level != "auto"), "none")

    def _recomputing_in(self, layer: int) -> list[forward_passes.RecomputingBlock]:
        # There are none where a job recomputes nothing.
        roots = self.structure.layer_roots(layer)
        return [self._recomputing[root] for root in roots if root in self._recomputing]

    def share_vocabulary(self, share: losses.VocabularyShare) -> None:
        """Compute the standard loss from the logits of these words alone, which the head has from now on."""
        self._vocabulary_share = share

    def share_tokens(self, share: TokenShare) -> None:
        """Have blocks take and return the hidden states of these tokens alone, as do messages between stages."""
        self._tokens = share
        *blocks, head = (self.modules_of(layer) for layer in range(1, self.structure.num_layers))
        share.cut_before(lambda: self.is_first, blocks[0][0])
        share.gather_before(lambda: self.is_tried, head[0])

    def hidden_shape(self, batch_size: int) -> tuple[int, int, int]:
        """Return the shape of the hidden states that a stage receives and returns for a microbatch."""
        structure = self.structure
        if self._tokens is not None:
            return self._tokens.shape_of(batch_size, structure.hidden_size)
        return batch_size, structure.sequence_length, structure.hidden_size

    def initialize(self, layers: Iterable[int], *, seed: int) -> None:
        """Set the parameters of held layers to their initial values, as `StageTensors.initialize` does."""
        self._tensors.initialize(layers, seed=seed)

    def start_buffers(self, layers: Iterable[int]) -> None:
        """Set the persistent buffers of held layers to their initial values."""
        self._tensors.start_buffers(layers)

    # --- what it computes ----------------------------------------------------------------------------------

    def carry(
        self, batch: Batch, received: Carried | None, *, num_items: int, key: MicrobatchKey, chunk: int = 0
    ) -> Carried:
        """Run the layers of a chunk as `forward` does; those of a traced model receive and return parcels."""
        if not isinstance(self._modules, FlowModules):
            assert not isinstance(received, Parcel)
            return self.forward(batch, received, num_items=num_items, key=key, chunk=chunk)
        assert not isinstance(received, torch.Tensor)
        self._modules.put_in_place(self.chunks[chunk])
        assert (received is None) == self.is_first, "parcels come from the stage before, if there is one"
        return self._traced(self._modules, batch, received, num_items, key)

    def forward(
        self, batch: Batch, hidden: torch.Tensor | None, *, num_items: int, key: MicrobatchKey, chunk: int = 0
    ) -> torch.Tensor:
        """Run the layers of a chunk on one microbatch.

        Arguments:
            batch: the microbatch, on this stage's device; the same on all stages, since each makes its own masks.
            hidden: the output of the chunk before, of `hidden_shape`; None for the first layers.
            num_items: the divisor of the sum of the token losses.
            key: the seed of dropout and other randomness, together with each layer's number.
            chunk: the index of a held chunk.

        Returns:
            Hidden states of `hidden_shape`; for the last layers the loss, a scalar.
        """
        check_attention(self._attention, batch)
        self._modules.put_in_place(self.chunks[chunk])
        assert (hidden is None) == self.is_first, "hidden states come from the stage before, if there is one"
        assert isinstance(self._modules, StageModules)
        # Within a stage hidden states are added up as precisely as in the uncut model.
        received = None if hidden is None else hidden.to(self.dtype)
        with self._tensors.buffers_in_use(), self._computing(), self._modules.running(batch, received, key):
            if isinstance(batch, WholeBatch):
                output = self._whole_loss(batch, num_items, key)
            else:
                output = self._loss(batch, num_items) if self.is_last else self._hidden(batch)
        if self._casts_once and output.requires_grad:
            keep_casts(output)
        return output

    def _traced(
        self, modules: FlowModules, batch: Batch, received: Parcel | None, num_items: int, key: MicrobatchKey
    ) -> Carried:
        assert isinstance(batch, WholeBatch)
        # A model may change labels in place, and other chunks of this stage read the same.
        batch = batch.mapped(lambda tensor: tensor if tensor.is_floating_point() else tensor.clone())
        if not batch.weight:
            return self._whole_loss(batch, num_items, key) if self.is_last else modules.nothing()
        with self._tensors.buffers_in_use(), self._computing(), modules.running(received, key):
            try:
                loss = self._whole_loss(batch, num_items, key)
            except StageIsDone:
                sent = modules.sent()
                for each in sent.carrying if self._casts_once else ():
                    if each.requires_grad:
                        keep_casts(each)
                return sent
        if self._casts_once and loss.requires_grad:
            keep_casts(loss)
        return loss

    @contextmanager
    def casting_once(self) -> Iterator[None]:
        """Within the block, autocast casts each weight once for all passes; weights must not change in it."""
        if self.autocast is None:
            yield
            return
        # Torch drops its casts when the outermost autocast ends, and each microbatch in flight would keep its own. The
        # outermost is disabled here, so that backward passes run as they do outside the block.
        with torch.autocast(self.device.type, enabled=False):
            self._casts_once = True
            try:
                yield
            finally:
                self._casts_once = False

    def _drop_casts(self) -> None:
        """Drop autocast's casts of weights, which have changed since or belong to another pass's graph."""
        # On a GPU, an outermost autocast has been left open on autograd's thread (`keep_casts`), which drops none.
        if self.autocast is not None and not self._casts_once:
            torch.clear_autocast_cache()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block, modules are in evaluation mode, whichever chunk is in place."""
        # From the model, only modules of the chunk in place are reached; those of other chunks are set one by one.
        modules = (self.model, *(module for layer in self.layers for module in self.modules_of(layer)))
        try:
            for module in modules:
                module.eval()
            yield
        finally:
            for module in modules:
                module.train()

    def _hidden(self, batch: Batch) -> torch.Tensor:
        others = {name: value for name, value in self._others(batch).items() if name in self._trunk_takes}
        output = self.model.base_model(input_ids=batch.input_ids, use_cache=False, **others)
        hidden: torch.Tensor = output.last_hidden_state
        if self._tokens is not None and not any(map(self.structure.is_block, self._modules.chunk)):
            hidden = self._tokens.cut(hidden)  # embedding alone
        return hidden.to(self.hidden_dtype)

    def _loss(self, batch: Batch, num_items: int) -> torch.Tensor:
        loss: torch.Tensor
        # With a cache, models overlook where documents begin.
        inputs = {"input_ids": batch.input_ids, "use_cache": False, **self._others(batch)}
        if self.compute_loss is not None:
            loss = self.compute_loss(self.model(**inputs), batch.labels, num_items)
        elif self.structure.task == "causal_lm" and (chunked := self._chunked_for(batch)) is not None:
            loss = chunked.loss(batch, num_items, scale=self.loss_scale, **inputs)
        elif self.structure.task == "causal_lm":
            outputs = self.model(labels=batch.labels, num_items_in_batch=num_items, **inputs)
            loss = self._share_of_mean(outputs, batch, num_items) if self.structure.loss_rule.is_mean else outputs.loss
        else:
            logits = self.model(**inputs).logits
            loss = losses.label_loss(logits if self.dtype == torch.float64 else logits.float(), batch.labels, num_items)
        return self._scaled(loss)

    def _whole_loss(self, batch: WholeBatch, num_items: int, key: MicrobatchKey) -> torch.Tensor:
        """Return the share of a microbatch in the loss of a step, as its data says (`WholeBatch`)."""
        assert self.structure.whole_loss is not None
        if not batch.weight:  # nothing in it counts, and a mean over nothing is not a number
            return torch.zeros((), device=self.device)
        inputs = mapped_tensors(batch.inputs, self._in_precision)
        divisor = num_items if batch.divides_by is None else batch.divides_by
        # Models and losses may also draw by numpy and random.
        seed = derive_seed(key.seed, "forward", key.step, key.microbatch)
        with drawing_alike(seed, beside=generators_of(self.device)):
            loss = self.structure.whole_loss(self.model, inputs, divisor, step=key.step)
        return self._scaled(loss if batch.divides_by is None else loss * (batch.weight / num_items))

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        if self.loss_scale != 1.0 and loss.requires_grad:
            scale = self.loss_scale  # as it is now: the backward pass may come after it changes
            loss.register_hook(lambda gradient: gradient * scale)  # type: ignore[no-untyped-call]
        return loss

    def _chunked_for(self, batch: Batch) -> losses.ChunkedLoss | None:
        """Return what computes a batch's loss by chunks of tokens; None where that is not needed, or not the same."""
        num_logits = batch.labels.numel() * (getattr(self.model.config, "vocab_size", None) or 0)
        is_needed = self._vocabulary_share is not None or self.computes_parts or num_logits > self._max_logits
        if not is_needed or self.structure.loss_rule.is_mean:
            return None
        chunked = self._chunked_loss()
        if chunked is not None and not chunked.is_watched():
            return chunked
        if self.computes_parts:
            raise ConfigError("context_parallel: a hook watches the logits of whole samples; take it off")
        return None

    def _chunked_loss(self) -> losses.ChunkedLoss | None:
        if self._chunked is None:
            self._modules.is_tried = True
            share, most = self._vocabulary_share, self._max_logits
            self._chunked = (losses.ChunkedLoss.of(self.model, max_logits=most, share=share),)
            self._modules.is_tried = False
        return self._chunked[0]

    def can_compute_loss_of_parts(self) -> bool:
        """Return whether the loss of a part of samples is known. The last layer must be held."""
        return self._chunked_loss() is not None

    def _script_loss(self) -> losses.Loss | None:
        """Return the script's loss, which its first microbatch tries where the trial on made-up outputs could not."""
        structure, model = self.structure, self.model
        if isinstance(model, LayeredModel):  # it calls its loss itself
            if model.loss is not None and not structure.has_tried_loss:
                model.loss = losses.tried_at_first(model.loss, model.loss, argument="num_items")
            return None
        if structure.compute_loss is None:
            return None
        loss = losses.loss_of_outputs(structure.compute_loss)
        return loss if structure.has_tried_loss else losses.tried_at_first(loss, structure.compute_loss)

    def _share_of_mean(self, outputs: Any, batch: Batch, num_items: int) -> torch.Tensor:
        """Return a microbatch's share of the mean over a step, from the mean over its own labels."""
        # A mean over no labels is not a number, and neither is its gradient.
        share = outputs.loss * (batch.num_items / num_items) if batch.num_items else outputs.logits.sum() * 0.0
        assert isinstance(share, torch.Tensor)
        return share

    def _others(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return a batch's tensors other than tokens and labels, floating-point ones in this stage's precision."""
        return {name: self._in_precision(value) for name, value in batch.others.items()}

    def _in_precision(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value

    def _computing(self) -> AbstractContextManager[object]:
        self._drop_casts()
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)
