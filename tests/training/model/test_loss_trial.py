"""What a model's own loss is, whoever wrote it: found before the first step, so that microbatches add up to what the
model returns for all samples at once, or refused by name."""

from __future__ import annotations

import functools
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MambaConfig,
    ModernBertConfig,
    ModernBertForMaskedLM,
)
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.modeling_outputs import CausalLMOutput

from oobleck.errors import ConfigError
from oobleck.training.data import IGNORED_LABEL, Batch
from oobleck.training.model import BatchSizes, LiveModel, MicrobatchKey, ModelStructure, StageModel, with_tried_loss
from oobleck.training.model.losses import LossRule
from tests.training.zoo import SPECS, structure_of

LENGTH, VOCAB_SIZE = 8, 40
SIZES = BatchSizes(batch=8, microbatch=2, length=LENGTH)
KEY = MicrobatchKey(seed=0, step=1, microbatch=0)
GPT2 = GPT2Config(
    n_embd=16, n_layer=2, n_head=2, n_positions=LENGTH, vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
BART = BartConfig(
    vocab_size=VOCAB_SIZE, d_model=16, encoder_layers=2, decoder_layers=2, decoder_attention_heads=2,
    decoder_ffn_dim=16, max_position_embeddings=16, dropout=0.0, is_encoder_decoder=False,
)  # fmt: skip


class OfOwn(GPT2LMHeadModel):
    """What many repositories have: a loss of their own, without a look at num_items_in_batch."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **others: Any) -> Any:
        logits = super().forward(input_ids=input_ids, attention_mask=attention_mask, **others).logits
        return CausalLMOutput(loss=None if labels is None else self.own(logits, labels), logits=logits)

    def own(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Mean(OfOwn):
    def own(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Unshifted(OfOwn):
    def own(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class OverAllPositions(OfOwn):
    """A mean that counts labels that are ignored."""

    def own(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()


class MeanOfSamples(OfOwn):
    """The mean over samples of the sum of each."""

    def own(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / len(labels)


def tried(model: Any) -> ModelStructure:
    structure = ModelStructure.from_live(LiveModel.skeleton_of(model), sequence_length=LENGTH)
    return with_tried_loss(structure)


def small(kind: str) -> Any:
    torch.manual_seed(2)
    match kind:
        case "mean":
            return Mean(GPT2)
        case "unshifted":
            return Unshifted(GPT2)
        case "bart":
            return AutoModelForCausalLM.from_config(BART)
        case "mamba":
            config = MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=2, state_size=4)
            return AutoModelForCausalLM.from_config(config)
        case "llama":
            config = LlamaConfig(
                vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                num_attention_heads=2, max_position_embeddings=LENGTH,
            )  # fmt: skip
            return AutoModelForCausalLM.from_config(config)
    return GPT2LMHeadModel(GPT2)


KINDS = {
    "mean": LossRule(is_mean=True),
    "unshifted": LossRule(is_mean=True, counts_first=True),
    "bart": LossRule(is_mean=True, counts_first=True),
    "llama": LossRule(),
    "gpt2": LossRule(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_of_a_loss_is_found(kind: str) -> None:
    assert tried(small(kind)).loss_rule == KINDS[kind]


@pytest.mark.parametrize("name", sorted(SPECS))
def test_models_that_transformers_makes_by_name_keep_their_losses(name: str) -> None:
    assert with_tried_loss(structure_of(name)).loss_rule == LossRule()


@pytest.mark.parametrize("kind", [*KINDS, "mamba"])
def test_microbatches_add_up_to_what_the_model_returns_for_all_samples(kind: str) -> None:
    """In microbatches of one sample, whose labels differ in number; one of them has none that counts."""
    model = small(kind).double()
    structure = tried(model)
    ids = torch.arange(3, 3 + 4 * LENGTH).reshape(4, LENGTH) % VOCAB_SIZE
    labels = ids.clone()
    labels[1, 3:] = labels[2, 1:5] = labels[3] = IGNORED_LABEL
    whole = Batch(input_ids=ids, labels=labels, is_causal=not structure.loss_rule.counts_first)
    expected = model(input_ids=ids, labels=labels, num_items_in_batch=whole.num_items, use_cache=False).loss
    expected.backward()
    stage = StageModel(structure, dtype=torch.float64, device="cpu")
    stage.adopt(0, structure.num_layers, {name: value.detach() for name, value in model.named_parameters()})
    total = torch.zeros((), dtype=torch.float64)
    for row in range(4):
        batch = replaced(whole, row)
        loss = stage.forward(batch, None, num_items=whole.num_items, key=KEY)
        loss.backward()
        total += loss.detach()
    assert float(total) == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(stage.parameters[name].grad, parameter.grad, rtol=1e-4, atol=1e-7, msg=name)


def replaced(whole: Batch, row: int) -> Batch:
    ids, labels = whole.input_ids[row : row + 1], whole.labels[row : row + 1]
    return Batch(input_ids=ids, labels=labels, is_causal=whole.is_causal).to(torch.device("cpu"))


@pytest.mark.parametrize("kind", [OverAllPositions, MeanOfSamples])
def test_a_loss_that_does_not_add_up_is_refused_by_the_name_of_its_class(kind: type[OfOwn]) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__} returns a loss of which it is not known"):
        tried(kind(GPT2))


def token_losses(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    logits = outputs["logits"] if not isinstance(outputs, torch.Tensor) else outputs
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return token_losses(outputs, labels).sum() / num_items_in_batch


def mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return token_losses(outputs, labels).mean()


def hardest(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    losses = token_losses(outputs, labels)
    return (losses.softmax(0).detach() * losses).sum() * losses.numel() / num_items_in_batch


def balanced(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    counted = labels[:, 1:].flatten()
    weights = 1 / (counted[:, None] == counted).sum(1)
    return (weights * token_losses(outputs, labels)).sum() / num_items_in_batch


def mean_of_counted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    counted = labels[:, 1:] != IGNORED_LABEL
    return token_losses(outputs, labels).sum() / counted.sum() * counted.numel() / num_items_in_batch


def flooded(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return (summed(outputs, labels, num_items_in_batch) - 0.1).abs() + 0.1


def cut_off(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return summed(outputs, labels, num_items_in_batch).clamp(max=8.0)


UNFIT = [flooded, cut_off, mean, hardest, balanced, mean_of_counted]


class Flooded(Mean):
    """What keeps losses from becoming small."""

    def own(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (super().own(logits, labels) - 0.1).abs() + 0.1


class OfTheHardest(OfOwn):
    """A mean that is one over all labels for a few of them."""

    def own(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.topk(min(16, len(losses))).values.sum() / (labels != IGNORED_LABEL).sum().clamp(max=16)


@pytest.mark.parametrize("kind", [Flooded, OfTheHardest])
def test_a_models_own_loss_is_tried_for_small_losses_and_with_the_jobs_own_batch(kind: type[OfOwn]) -> None:
    structure = ModelStructure.from_live(LiveModel.skeleton_of(kind(GPT2)), sequence_length=LENGTH)
    with pytest.raises(
        ConfigError, match=f"{kind.__name__} returns a loss of which it is not known .* in all, by the mean"
    ):
        with_tried_loss(structure, SIZES)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_a_batch_of_the_jobs_own_size_follow_the_rule_that_was_found(kind: str) -> None:
    structure = ModelStructure.from_live(LiveModel.skeleton_of(small(kind)), sequence_length=LENGTH)
    assert with_tried_loss(structure, SIZES).loss_rule == KINDS[kind]


class OfStates(Mean):
    """Keeps hidden states small."""

    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        output = GPT2LMHeadModel.forward(self, input_ids=input_ids, output_hidden_states=True, **others)
        states = sum(each.square().sum() for each in output.hidden_states or ())
        return CausalLMOutput(loss=None if labels is None else self.own(output.logits, labels) + states)


def test_a_loss_that_reads_what_blocks_return_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the loss of OfStates (reads hidden_states|cannot be tried on its head)"):
        tried(OfStates(GPT2))


class Counting:
    """A loss that knows how often it was called."""

    calls = 0

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        self.calls += 1
        return summed(outputs, labels, num_items_in_batch)


def with_loss(loss: Any, model: Any = None) -> ModelStructure:
    live = LiveModel.skeleton_of(model or small("gpt2"))
    return ModelStructure.from_live(live, compute_loss=loss, sequence_length=LENGTH)


@pytest.mark.parametrize("loss", UNFIT)
def test_a_function_whose_microbatches_do_not_add_up_is_refused_by_its_name(loss: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"compute_loss_func: {loss.__name__} must return a sum divided by num_items"
    ):
        with_tried_loss(with_loss(loss))


def doubled_beyond_four(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return summed(outputs, labels, num_items_in_batch) * (2 if len(labels) > 4 else 1)


def test_a_function_is_tried_with_the_jobs_own_batch() -> None:
    words = "doubled_beyond_four must return a sum .* of 8 samples it returns .* of microbatches of 2"
    with pytest.raises(ConfigError, match=words):
        with_tried_loss(with_loss(doubled_beyond_four), SIZES)
    assert with_tried_loss(with_loss(doubled_beyond_four), replace(SIZES, batch=4)).has_tried_loss
    assert with_tried_loss(with_loss(summed), replace(SIZES, batch=1000, length=10**6)).has_tried_loss


@pytest.mark.parametrize("name", ["hidden_states", "attentions"])
def test_a_function_that_reads_what_blocks_return_is_refused(name: str) -> None:
    def reading(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        found = getattr(outputs, name)
        more = 0.0 if found is None else sum(each.square().sum() for each in found) / num_items_in_batch
        return summed(outputs, labels, num_items_in_batch) + more

    for loss, is_asked_for in ((reading, False), (summed, True), (reading, True)):
        model = small("gpt2")
        model.set_attn_implementation("eager")
        setattr(model.config, f"output_{name}", is_asked_for)
        if (loss, is_asked_for) == (reading, True):
            with pytest.raises(ConfigError, match=f"reading must return a sum .* it reads outputs.{name}"):
                with_tried_loss(with_loss(loss, model))
        else:
            assert with_tried_loss(with_loss(loss, model)).has_tried_loss


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bart"])
def test_a_function_that_adds_up_is_taken_and_called_once_for_a_microbatch(kind: str) -> None:
    loss = Counting()
    structure = with_tried_loss(with_loss(loss, small(kind)))
    stage = StageModel(structure, dtype=torch.float64, device="cpu")
    stage.adopt(0, structure.num_layers, {})
    before = loss.calls
    ids = torch.ones(2, LENGTH, dtype=torch.int64)
    stage.forward(Batch(input_ids=ids, labels=ids), None, num_items=9, key=KEY)
    assert loss.calls == before + 1


def test_a_function_that_classifies_samples_is_tried_too() -> None:
    model = BertForSequenceClassification(
        BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=40)
    )

    def by_frequency(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        weights = 1 / (labels[:, None] == labels).sum(1)
        losses = functional.cross_entropy(outputs.logits, labels, reduction="none")
        return (weights * losses).sum() / num_items_in_batch

    def plain(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        return functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    assert with_tried_loss(with_loss(plain, model)).has_tried_loss
    with pytest.raises(ConfigError, match="by_frequency must return a sum"):
        with_tried_loss(with_loss(by_frequency, model))


BERT = BertConfig(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=40, num_labels=3
)
MODERN_BERT = ModernBertConfig(
    vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
)  # fmt: skip
LLAMA = LlamaConfig(
    vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=LENGTH, num_labels=3, pad_token_id=0,
)  # fmt: skip


def by_class(logits: Any, labels: Any, pooled_logits: Any = None, *others: Any, **options: Any) -> torch.Tensor:
    predictions = logits if pooled_logits is None or not isinstance(pooled_logits, torch.Tensor) else pooled_logits
    return functional.cross_entropy(predictions.reshape(-1, 3), labels.reshape(-1), torch.tensor([1.0, 2.0, 7.0]))


class ForSequenceClassificationByClass(LlamaForSequenceClassification):
    def loss_function(self, *given: Any, **named: Any) -> torch.Tensor:
        return by_class(*given, **named)


class ForTokenClassificationByClass(LlamaForTokenClassification):
    loss_function = staticmethod(by_class)


def with_own_loss(outputs: Any, labels: Any) -> Any:
    if labels is not None:
        outputs.loss = by_class(outputs.logits, labels)
    return outputs


def on_the_instance(model: Any) -> Any:
    def forward(self: Any, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        return with_own_loss(type(self).forward(self, input_ids=input_ids, **others), labels)

    model.forward = types.MethodType(forward, model)
    return model


def in_a_partial(model: Any) -> Any:
    theirs = type(model).forward

    @functools.wraps(theirs)
    def forward(self: Any, labels: Any = None, **others: Any) -> Any:
        return with_own_loss(theirs(self, **others), labels)

    model.forward = functools.wraps(forward)(functools.partial(forward, model))
    return model


def by_a_hook(model: Any) -> Any:
    def add(module: Any, given: Any, named: Any, outputs: Any) -> Any:
        return with_own_loss(outputs, named.get("labels"))

    model.register_forward_hook(add, with_kwargs=True)
    return model


def of_another_type(model: Any) -> Any:
    model.loss_type = "ForCausalLM"
    return model


def in_transformers_own_table(model: Any) -> Any:
    LOSS_MAPPING["ForSequenceClassificationByClass"] = by_class
    model.loss_type = "ForSequenceClassificationByClass"
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ForSequenceClassificationByClass(LLAMA), r"loss_function, line \d+ of test_loss_trial\.py"),
        (lambda: ForTokenClassificationByClass(LLAMA), r"by_class, line \d+ of test_loss_trial\.py"),
        (lambda: on_the_instance(LlamaForSequenceClassification(LLAMA)), r"of its own \(on_the_instance"),
        (lambda: on_the_instance(BertForTokenClassification(BERT)), r"of its own \(on_the_instance"),
        (lambda: in_a_partial(LlamaForSequenceClassification(LLAMA)), r"of its own \(in_a_partial"),
        (lambda: in_transformers_own_table(LlamaForSequenceClassification(LLAMA)), "by_class, line"),
        (lambda: by_a_hook(LlamaForSequenceClassification(LLAMA)), "whose cross entropy is"),
        (lambda: by_a_hook(BertForTokenClassification(BERT)), "whose cross entropy is"),
        (lambda: of_another_type(ModernBertForMaskedLM(MODERN_BERT)), "whose cross entropy is"),
    ],
)
def test_a_loss_that_plain_labels_would_be_trained_without_is_refused(make: Any, words: str) -> None:
    try:
        with pytest.raises(ConfigError, match=words):
            tried(make())
    finally:
        LOSS_MAPPING.pop("ForSequenceClassificationByClass", None)


def test_a_replaced_forward_of_the_class_is_found_behind_its_wrapping(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = BertForSequenceClassification.forward

    @functools.wraps(theirs)
    def forward(self: Any, *given: Any, labels: Any = None, **named: Any) -> Any:
        return with_own_loss(theirs(self, *given, **named), labels)

    tried(BertForSequenceClassification(BERT))
    monkeypatch.setattr(BertForSequenceClassification, "forward", forward)
    with pytest.raises(ConfigError, match=r"of its own \(test_a_replaced_forward.*line \d+ of test_loss_trial\.py"):
        tried(BertForSequenceClassification(BERT))


def as_accelerate_wraps_it(model: Any) -> Any:
    return add_hook_to_module(model, ModelHook())


def with_a_look(model: Any) -> Any:
    model.register_forward_hook(lambda module, given, outputs: None)
    return model


class ForSequenceClassificationWithMore(LlamaForSequenceClassification):
    """A subclass that leaves the forward and the loss as they are."""

    def count(self) -> int:
        return self.num_parameters()


@pytest.mark.parametrize(
    "make",
    [
        lambda: LlamaForSequenceClassification(LLAMA),
        lambda: LlamaForTokenClassification(LLAMA),
        lambda: BertForMaskedLM(BERT),
        lambda: ModernBertForMaskedLM(MODERN_BERT),
        lambda: ForSequenceClassificationWithMore(LLAMA),
        lambda: as_accelerate_wraps_it(BertForSequenceClassification(BERT)),
        lambda: with_a_look(BertForTokenClassification(BERT)),
        lambda: of_another_type(BertForMaskedLM(BERT)),  # whose forward does not ask for a loss_function
    ],
)
def test_a_loss_of_plain_labels_that_is_their_cross_entropy_is_taken(make: Any) -> None:
    assert tried(make()).loss_rule == LossRule()


def test_a_function_that_made_up_outputs_do_not_suit_is_tried_on_its_first_microbatch() -> None:
    def picky(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        if labels.max() < 16:
            raise ValueError("no such labels")
        return hardest(outputs, labels, num_items_in_batch)

    structure = with_tried_loss(with_loss(picky))
    ids = 20 + torch.arange(2 * LENGTH).view(2, LENGTH)
    state = {name: torch.rand(shape) for name, shape in structure.shapes.items()}
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    stage.adopt(0, structure.num_layers, state)
    with pytest.raises(ConfigError, match="picky must return a sum"):
        stage.forward(Batch(input_ids=ids, labels=ids), None, num_items=9, key=KEY)


class WarmingUp(Counting):
    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        return super().__call__(outputs, labels, num_items_in_batch) * min(1.0, self.calls / 1000)


class OtherwiseLater(Counting):
    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        return super().__call__(outputs, labels, num_items_in_batch) * (0.5 if self.calls > 500 else 1.0)


def otherwise_later() -> Any:
    calls = 0

    def counted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return summed(outputs, labels, num_items_in_batch) * (0.5 if calls > 500 else 1.0)

    return counted


STATE = {"losses": [0.0]}


def logging(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    STATE["losses"].append(0.5)
    return summed(outputs, labels, num_items_in_batch)


def by_its_log(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return logging(outputs, labels, num_items_in_batch) * (0.5 if len(STATE["losses"]) > 500 else 1.0)


COUNTING = [
    (lambda: by_its_log, r"by_its_log must .* it depends on the global STATE\['losses'\], which changes"),
    (WarmingUp, "WarmingUp must .* when it runs again"),
    (OtherwiseLater, r"OtherwiseLater must .* it depends on OtherwiseLater\.calls, which changes with every call"),
    (otherwise_later, r"counted must .* it depends on .*counted\.calls, which changes with every call"),
]


@pytest.mark.parametrize(("make", "words"), COUNTING)
def test_a_function_that_depends_on_how_often_it_was_called_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"compute_loss_func: .*{words}"):
        with_tried_loss(with_loss(make()))


def test_a_models_own_loss_that_depends_on_how_often_it_was_called_is_refused() -> None:
    class Scheduled(Mean):
        calls = 0

        def own(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().own(logits, labels) * min(1.0, self.calls / 1000)

    with pytest.raises(ConfigError, match=r"Scheduled returns (a loss of which|another loss when)"):
        tried(Scheduled(GPT2))


def test_a_models_own_loss_that_depends_on_a_count_later_is_refused() -> None:
    class Scheduled(Mean):
        def own(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            STATE["losses"].append(0.5)
            later = self.training and len(STATE["losses"]) > 500
            return super().own(logits, labels) * (0.5 if later else 1.0)

    with pytest.raises(ConfigError, match=r"Scheduled returns another loss later, by the global STATE\['losses'\]"):
        tried(Scheduled(GPT2))


def layers() -> list[torch.nn.Module]:
    return [torch.nn.Embedding(VOCAB_SIZE, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, VOCAB_SIZE)]


@pytest.mark.parametrize("loss", UNFIT)
def test_a_loss_of_layers_whose_microbatches_do_not_add_up_is_refused_by_its_name(loss: Any) -> None:
    structure = ModelStructure.from_factory(layers, loss=loss, vocab_size=VOCAB_SIZE, sequence_length=LENGTH)
    with pytest.raises(
        ConfigError, match=rf"the script's loss: {loss.__name__} must return a sum divided by num_items,"
    ):
        with_tried_loss(structure)


@pytest.mark.parametrize(("make", "words"), COUNTING)
def test_a_loss_of_layers_that_depends_on_how_often_it_was_called_is_refused(make: Any, words: str) -> None:
    structure = ModelStructure.from_factory(layers, loss=make(), vocab_size=VOCAB_SIZE, sequence_length=LENGTH)
    with pytest.raises(ConfigError, match=f"the script's loss: .*{words}"):
        with_tried_loss(structure)


@pytest.mark.parametrize("loss", [summed, Counting(), logging, None])
def test_a_loss_of_layers_that_adds_up_is_taken(loss: Any) -> None:
    structure = ModelStructure.from_factory(layers, loss=loss, vocab_size=VOCAB_SIZE, sequence_length=LENGTH)
    assert with_tried_loss(structure).has_tried_loss is (loss is not None)


@pytest.mark.parametrize(("least", "is_tried"), [(2, True), (16, False)])
def test_a_loss_of_layers_is_tried_with_other_labels_and_else_on_its_first_microbatch(
    least: int, is_tried: bool
) -> None:
    def picky(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        if labels.max() < least:
            raise ValueError("no such labels")
        return hardest(outputs, labels, num_items_in_batch)

    structure = ModelStructure.from_factory(layers, loss=picky, vocab_size=VOCAB_SIZE, sequence_length=LENGTH)
    refused = pytest.raises(ConfigError, match=r"the script's loss: .*picky must return a sum divided by num_items,")
    if is_tried:
        with refused:
            with_tried_loss(structure)
        return
    stage = StageModel(with_tried_loss(structure), dtype=torch.float32, device="cpu")
    stage.adopt(0, structure.num_layers, {name: torch.rand(shape) for name, shape in structure.shapes.items()})
    ids = 20 + torch.arange(2 * LENGTH).view(2, LENGTH)
    with refused:
        stage.forward(Batch(input_ids=ids, labels=ids), None, num_items=9, key=KEY)
