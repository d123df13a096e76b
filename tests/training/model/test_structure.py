from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    ElectraConfig,
    ElectraForPreTraining,
    GenerationMixin,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2LMHeadModel,
    GPT2Model,
    GPT2PreTrainedModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from oobleck.errors import ConfigError
from oobleck.job import ModelSpec, Scalar
from oobleck.training.model import LiveModel
from oobleck.training.model.configuration import build_config
from oobleck.training.model.structure import ModelStructure
from tests.training.zoo import SPECS, structure_of, whole_stage


def _from_spec(model_type: str, config: Mapping[str, Scalar]) -> ModelStructure:
    return ModelStructure.from_spec(ModelSpec(type=model_type, config=config), vocab_size=96, sequence_length=24)


def test_layers_are_the_embedding_every_block_and_the_head():
    structure = structure_of("gpt2")
    assert structure.layer_names == ("embedding", *(f"transformer.h.{i}" for i in range(4)), "head")
    assert structure.layer_parameters(0) == ("transformer.wte.weight", "transformer.wpe.weight")
    assert structure.layer_parameters(2)[0] == "transformer.h.1.ln_1.weight"
    assert structure.layer_parameters(5) == (
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
        "transformer.wte.weight",
    )


def test_a_tied_parameter_belongs_to_both_layers_and_counts_once():
    tied, untied = structure_of("llama-tied"), structure_of("llama")
    last = tied.num_layers - 1
    assert tied.layers_with("model.embed_tokens.weight") == (0, last)
    assert tied.layers_with("model.norm.weight") == (last,)
    assert untied.layers_with("lm_head.weight") == (last,)
    assert untied.num_parameters - tied.num_parameters == 96 * 32


@pytest.mark.parametrize("name", SPECS)
def test_parameters_are_those_of_the_transformers_model(name: str):
    structure = structure_of(name)
    auto = AutoModelForCausalLM if structure.task == "causal_lm" else AutoModelForMaskedLM
    with torch.device("meta"):
        model = auto.from_config(structure.config)
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert dict(structure.shapes) == expected
    assert structure.num_parameters == model.num_parameters()
    assert sorted({n for layer in range(structure.num_layers) for n in structure.layer_parameters(layer)}) == sorted(
        expected
    )
    assert tuple(whole_stage(structure).parameters) == tuple(structure.shapes)


def test_dropout_is_noticed_wherever_it_hides():
    assert structure_of("gpt2-dropout").draws_at_random
    assert not structure_of("gpt2").draws_at_random
    # Llama's attention takes a probability from the configuration; there is no module to find.
    assert _from_spec("llama", {**SPECS["llama"].config, "attention_dropout": 0.1}).draws_at_random


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("gpt-2", {}, r"'gpt-2' is not a language model; did you mean 'gpt2'\?"),
        ("bert-like-thing-from-nowhere", {}, r"is not a language model$"),
        ("gpt2", {"n_layers": 3}, r"model\.config\.n_layers: gpt2 has no such key; did you mean 'n_layer'\?"),
        ("gpt2", {"n_layer": "three"}, r"gpt2 refuses it: .*n_layer.*expected int, got str"),
        ("gpt2", {"n_embd": 30, "n_head": 4}, r"gpt2 cannot be built"),
        ("gpt2", {"vocab_size": 50}, r"50 is less than the tokenizer's 96"),
        ("gpt2", {"n_positions": 16}, r"data\.sequence_length: 24 is more than the model's 16 positions.*n_positions"),
    ],
)
def test_mistakes_are_named(model_type: str, config: dict[str, Scalar], message: str):
    with pytest.raises(ConfigError, match=message):
        _from_spec(model_type, config)


def test_a_loss_over_all_routers_cannot_be_split():
    with pytest.raises(ConfigError, match=r"output_router_logits"):
        _from_spec("mixtral", {**SPECS["mixtral"].config, "output_router_logits": True})


def test_models_that_are_no_chain_of_blocks_are_refused_with_the_reason():
    gemma4 = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    with pytest.raises(ConfigError, match=r"block 0 .*argument 1"):
        _from_spec("gemma4_text", gemma4)
    roformer = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    with pytest.raises(ConfigError, match=r"roformer\.encoder\.embed_positions computes without gradients"):
        _from_spec("roformer", roformer)
    with pytest.raises(ConfigError, match=r"12 transformer blocks .* has transformer\.h \(12 Block\)"):
        _from_spec("openai-gpt", {})


def test_encoder_decoders_are_refused_with_the_reason(tmp_path: Path):
    """BART has a class that is its decoder alone: a directory of the whole must not be trained as that."""
    reason = "is an encoder-decoder: every block of its decoder reads the encoder's output"
    with pytest.raises(ConfigError, match=f"t5 {reason}"):
        _from_spec("t5", {})
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    bart = BartConfig(**sizes, encoder_attention_heads=2, decoder_attention_heads=2, vocab_size=96)
    BartForConditionalGeneration(bart).save_pretrained(tmp_path)
    spec = ModelSpec(path=str(tmp_path))
    with pytest.raises(ConfigError, match=reason):
        ModelStructure.from_spec(spec, vocab_size=96, sequence_length=24)
    with pytest.raises(ConfigError, match=reason):
        ModelStructure.from_factory(lambda: BartForConditionalGeneration(bart), vocab_size=96, sequence_length=24)
    t5 = T5Config(vocab_size=96, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ConfigError, match=r"T5ForConditionalGeneration .*encoder-decoder"):
        ModelStructure.from_factory(lambda: T5ForConditionalGeneration(t5), vocab_size=96, sequence_length=24)
    decoder = ModelStructure.from_spec(
        ModelSpec(path=str(tmp_path), task="causal_lm"), vocab_size=96, sequence_length=24
    )
    assert decoder.task == "causal_lm", "who asks for it has it"


def test_a_model_that_looks_into_its_blocks_is_refused_with_its_error():
    def look(module: torch.nn.Module, _: object) -> None:
        if not isinstance(module.h[0], GPT2Block):
            raise TypeError("its first block is of another kind")

    def factory() -> GPT2LMHeadModel:
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 24}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        model.transformer.register_forward_pre_hook(look)
        return model

    words = r"it does not run without its blocks \(its first block is of another kind\), in .*look, line \d+ of"
    with pytest.raises(ConfigError, match=words):
        ModelStructure.from_factory(factory, vocab_size=96, sequence_length=24)


class WithTensor(GPT2LMHeadModel):
    weights = torch.ones(96)

    def forward(self, input_ids: Any = None, labels: Any = None, scale: Any = None, **others: Any) -> Any:
        output = super().forward(input_ids=input_ids, **others)
        losses = output.logits.log_softmax(-1) * self.of(input_ids, scale)
        output.loss = None if labels is None else losses.sum()
        return output

    def of(self, ids: torch.Tensor, scale: Any) -> Any:
        return self.weights


class ByValues(WithTensor):
    def of(self, ids: torch.Tensor, scale: Any) -> Any:
        return len(ids.unique())


class WithoutItsScale(WithTensor):
    def of(self, ids: torch.Tensor, scale: Any) -> Any:
        return scale[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WithTensor, "it computes with a tensor, or a model, that is none of its own: .*, in WithTensor.forward, line"),
        (ByValues, "what it does depends on values of tensors, by aten._unique2.*, in ByValues.of, line"),
        (WithoutItsScale, "it is given input_ids and labels alone.*, in WithoutItsScale.of, line"),
    ],
)
def test_a_model_that_does_not_run_without_values_is_refused_with_its_line(kind: Any, words: str):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 24}
    model = kind(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with pytest.raises(ConfigError, match=words):
        ModelStructure.from_live(LiveModel.skeleton_of(model), sequence_length=24)


def test_no_special_token_lies_outside_of_the_vocabulary():
    for name in ("gpt2", "opt", "phi3"):
        config = build_config(SPECS[name], vocab_size=96, sequence_length=24)
        assert config.bos_token_id == config.eos_token_id == 0
        assert config.pad_token_id is None, "no token may be one that never learns"
        assert config.vocab_size == 96
    chosen = build_config(ModelSpec(config={"vocab_size": 128, "eos_token_id": 5}), vocab_size=96, sequence_length=24)
    assert chosen.vocab_size == 128
    assert chosen.eos_token_id == 5


def test_layers_of_a_kind_compute_alike():
    structure = structure_of("gpt2")
    blocks = {structure.layer_kind(layer) for layer in range(1, structure.num_layers - 1)}
    assert len(blocks) == 1
    assert len({structure.layer_kind(layer) for layer in range(structure.num_layers)}) == 3


def test_what_is_predicted_follows_from_the_type_unless_it_is_said():
    bert = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    assert _from_spec("bert", bert).task == "masked_lm"
    assert _from_spec("bert", {**bert, "is_decoder": True}).task == "causal_lm"
    assert structure_of("opt").task == "causal_lm"
    spec = ModelSpec(type="opt", config=SPECS["opt"].config, task="masked_lm")
    with pytest.raises(ConfigError, match=r"model\.task: opt .*masked_lm"):
        ModelStructure.from_spec(spec, vocab_size=96, sequence_length=24)


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "modernbert", "modernbert-decoder", "gemma3_text"])
def test_types_whose_defaults_need_a_padding_token_or_look_at_what_they_draw_are_built_by_name(name: str):
    config = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    structure = _from_spec(name, config)
    whole_stage(structure)
    assert structure.num_blocks == 2


def test_a_type_that_counts_positions_by_its_padding_has_a_padding_token_and_no_other_has():
    config = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    assert _from_spec("roberta", config).config.pad_token_id == 0
    assert _from_spec("roberta", {**config, "pad_token_id": 3}).config.pad_token_id == 3
    assert _from_spec("bert", config).config.pad_token_id is None


BERT = BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)


class OwnQuestionAnswering(BertForQuestionAnswering):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: BertForQuestionAnswering(BERT),
        lambda: BertForPreTraining(BERT),
        lambda: BertForMultipleChoice(BERT),
        lambda: ElectraForPreTraining(ElectraConfig(**BERT.to_diff_dict())),
        lambda: GPT2DoubleHeadsModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=96)),
        lambda: LlamaModel(LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=96)),
        lambda: OwnQuestionAnswering(BERT),
    ],
)
def test_heads_that_no_task_is_known_for_are_refused_by_name(make: Callable[[], PreTrainedModel]):
    name = type(make()).__name__
    with pytest.raises(ConfigError, match=rf"{name} has a head that no task is known for; known are causal_lm, "):
        ModelStructure.from_factory(make, vocab_size=96, sequence_length=24)


class OwnHead(GPT2PreTrainedModel, GenerationMixin):
    """What a research repository may have: a head of its own, and a loss."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer = GPT2Model(config)
        self.predict = torch.nn.Linear(config.n_embd, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: object) -> CausalLMOutput:
        logits = self.predict(self.transformer(input_ids).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


class OwnHeadWithoutALoss(OwnHead):
    def forward(self, input_ids: torch.Tensor, **options: object) -> CausalLMOutput:  # type: ignore[override]
        return CausalLMOutput(logits=self.predict(self.transformer(input_ids).last_hidden_state))


def test_a_class_of_ones_own_that_can_generate_is_a_causal_language_model():
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=96, n_positions=24)
    structure = ModelStructure.from_factory(lambda: OwnHead(config), vocab_size=96, sequence_length=24)
    assert structure.task == "causal_lm"
    assert "predict.weight" in structure.layer_parameters(3)
    with pytest.raises(ConfigError, match="OwnHeadWithoutALoss returns no loss for labels"):
        ModelStructure.from_factory(lambda: OwnHeadWithoutALoss(config), vocab_size=96, sequence_length=24)


class Weighted(BertForSequenceClassification):
    """What many scripts have: a loss of its own in the model's forward."""

    def forward(self, *args: object, labels: torch.Tensor | None = None, **options: object) -> SequenceClassifierOutput:
        outputs = super().forward(*args, **options)
        loss = None if labels is None else 3 * torch.nn.functional.cross_entropy(outputs.logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=outputs.logits)


def with_a_loss_function(config: BertConfig) -> BertForSequenceClassification:
    model = BertForSequenceClassification(config)
    model.loss_function = lambda *args, **options: args[0].sum()
    return model


@pytest.mark.parametrize("make", [Weighted, with_a_loss_function])
def test_a_loss_of_its_own_that_would_be_passed_over_is_refused(make: Callable[[BertConfig], PreTrainedModel]):
    config = BertConfig(**{**BERT.to_diff_dict(), "num_labels": 3, "pad_token_id": 0})
    model = make(config)
    live = LiveModel.skeleton_of(model)
    with pytest.raises(
        ConfigError, match=rf"{type(model).__name__} has a forward or a loss_function .*compute_loss_func"
    ):
        ModelStructure.from_live(live, sequence_length=8)
    assert ModelStructure.from_live(live, compute_loss=lambda *_: torch.zeros(()), sequence_length=8).num_blocks == 2
