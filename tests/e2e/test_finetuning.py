"""Fine-tuning on pipelines, with a node killed on the way, is what transformers computes in one process.

The other side shares only the order of samples: it pads to the longest sample of a microbatch, has transformers' model
give the losses of whole steps, and torch's AdamW apply them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from oobleck.job import LoraSpec, ModelSpec
from oobleck.training.data.data import Dataset
from oobleck.training.data.sampling import samples_of_step
from oobleck.training.data.script_data import ScriptSamples
from oobleck.training.model.structure import ModelStructure
from tests.training.zoo import state_of, whole_stage

from .elastic import ENDLESS, assert_nothing_lost, lost_nodes, stopped
from .finetuning_job import LENGTH, LORA, NUM_LABELS, PAD, VOCAB_SIZE, samples
from .finetuning_reference import as_tensors, mean_loss, saved_model, step_losses
from .harness import TAG, Runner

SCRIPT = str(Path(__file__).with_name("finetuning_job.py"))
TOLERANCE = 1e-6
KILL_STEP = 6

CONFIGS = {
    "gpt2": GPT2Config(
        n_embd=32, n_layer=4, n_head=2, n_positions=LENGTH, vocab_size=VOCAB_SIZE, num_labels=NUM_LABELS,
        pad_token_id=PAD, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "llama": LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCAB_SIZE, max_position_embeddings=LENGTH, num_labels=NUM_LABELS, pad_token_id=PAD,
    ),
}  # fmt: skip


def transformers_losses(case: str, directory: Path) -> Iterator[tuple[float, float]]:
    """The loss of each step, and the one on the samples for evaluation after it."""
    model = saved_model(case, directory)
    if case == "lora":
        model = with_adapters(model, directory)
    everything = as_tensors(samples(case))
    train, kept = ([everything[number] for number in side] for side in sides(len(everything)))
    batches = ([train[index] for index in samples_of_step(0, step, 16, len(train))] for step in range(1, ENDLESS))
    for step, loss in enumerate(step_losses(model, case, batches), 1):
        with torch.no_grad():
            yield loss, float(mean_loss(model.eval(), case, kept)) if step % 10 == 0 else 0.0
        model.train()


def with_adapters(model: PreTrainedModel, directory: Path) -> Any:
    """PEFT's own model, whose adapters start as ours do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how GPT-2's weights lie, and of what transformers will drop
        adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    spec = ModelSpec(path=str(directory), lora=LoraSpec(**LORA))
    structure = ModelStructure.from_spec(spec, vocab_size=VOCAB_SIZE, sequence_length=LENGTH)
    start = state_of(whole_stage(structure, dtype=torch.float64))
    with torch.no_grad():
        for name, parameter in adapted.base_model.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(start[name])
    return adapted


def sides(count: int) -> Iterator[list[int]]:
    """The numbers of the samples to train on, and of those kept for evaluation."""
    numbers = ScriptSamples(lambda: [[number, number] for number in range(count)], sequence_length=2, vocab_size=count)
    for side in Dataset(numbers).split(0.25):
        assert side is not None
        yield side.batch(range(side.num_samples)).input_ids[:, 0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("gpt2", "padded"),
        ("gpt2", "lora"),
        ("llama", "lora"),
        ("llama", "packed"),
        ("llama", "padded"),
        ("gpt2", "packed"),
        ("llama", "labels"),
        ("gpt2", "labels"),
    ],
)
def test_losses_are_those_of_transformers_whatever_fails(
    runner: Runner, tmp_path: Path, family: str, case: str
) -> None:
    torch.manual_seed(3)
    auto: Any = AutoModelForSequenceClassification if case == "labels" else AutoModelForCausalLM
    auto.from_config(CONFIGS[family]).save_pretrained(tmp_path / "model")
    options = ("--steps", str(ENDLESS), "--tag", TAG, "--kill", f"node2@{KILL_STEP}")
    with runner.up(*options, "--", case, str(tmp_path / "model"), nodes=("--local", "4", SCRIPT)) as up:
        up.wait_for_loss("node2")
        up.wait_for_steps(6)
        outcome = stopped(runner, up)
    assert lost_nodes(outcome) == ["node2"]
    assert_nothing_lost(outcome, len(outcome.losses))
    expected = list(islice(transformers_losses(case, tmp_path / "model"), len(outcome.losses)))
    assert [loss for loss, _ in expected] == pytest.approx(outcome.losses, rel=0, abs=TOLERANCE)
    evaluations = [entry["loss"] for entry in runner.journal() if entry["@type"] == "Evaluated"]
    assert [loss for _, loss in expected if loss][: len(evaluations)] == pytest.approx(evaluations, abs=TOLERANCE)
    assert evaluations or len(outcome.losses) < 10


@pytest.mark.slow
def test_conversations_are_fine_tuned_from_a_job_file_alone(runner: Runner, tmp_path: Path) -> None:
    """A saved model with a tokenizer and its chat template, JSON lines, several conversations a sample."""
    answers = [f"{number} and {number} is {2 * number}" for number in range(200)]
    rows = [
        {"messages": [{"role": "user", "content": f"twice {n}?"}, {"role": "assistant", "content": answer}]}
        for n, answer in enumerate(answers)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>", "<|user|>", "<|assistant|>"])
    made.train_from_iterator(answers, trainer)
    template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    saved = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", chat_template=template)
    saved.save_pretrained(tmp_path / "model")
    config = GPT2Config(n_embd=32, n_layer=4, n_head=2, n_positions=96, vocab_size=len(saved))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(
        f"tag: {TAG}\nmodel: {{path: {tmp_path / 'model'}}}\n"
        f"data: {{paths: [{tmp_path / 'chat.jsonl'}], format: messages, packing: true, sequence_length: 96}}\n"
        "max_steps: 16\nglobal_batch_size: 8\nnum_pipelines: 2\ntorch_threads: 1\n"
        "optimizer: {learning_rate: 0.01, warmup_steps: 2}\n"
    )
    outcome = runner.run("--job", str(tmp_path / "job.yaml"), "--kill", "node1@5")
    assert_nothing_lost(outcome, 16)
    assert outcome.losses[-1] < outcome.losses[0] - 0.5, "it learns"
