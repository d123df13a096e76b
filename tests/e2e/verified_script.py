"""Scripts of transformers' Trainer, one for each kind of thing that a script may bring: `verified_script.py KIND`.

`oobleck verify` compares them with transformers' own Trainer. They write nothing before `train()`; the line after it
must never be reached.
"""

import sys

import torch
from torch import nn
from torch.utils.data import Sampler, WeightedRandomSampler
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    default_data_collator,
)
from transformers.modeling_outputs import CausalLMOutput

from oobleck.transformers import Trainer

LENGTH, VOCAB_SIZE, NUM_ROWS = 16, 64, 64
SMALL = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


class Backwards(Sampler):
    """The samples in an order of its own."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __iter__(self):
        return iter(range(self.num_samples - 1, -1, -1))


class OwnSampler(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return Backwards(NUM_ROWS)


class WeightedSampler(Trainer):
    """Draws from the process's random numbers."""

    def _get_train_sampler(self, *args, **kwargs):
        return WeightedRandomSampler([1.0 + number % 5 for number in range(NUM_ROWS)], num_samples=16)


class OwnSamples(Trainer):
    """Not called by Oobleck, which has to say so."""

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        return super().get_batch_samples(epoch_iterator, num_batches, device)


class MeanLoss(GPT2LMHeadModel):
    """Takes the mean over its batch itself, as models of many repositories do."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **others):
        logits = super().forward(input_ids=input_ids, attention_mask=attention_mask, **others).logits
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def gpt2(kind=GPT2LMHeadModel, **options):
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    return kind(GPT2Config(n_embd=32, n_layer=4, n_head=2, n_positions=LENGTH, **dropout, **SMALL, **options))


def llama(**options):
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(num_key_value_heads=1, max_position_embeddings=LENGTH, **config, **SMALL, **options)
    )


def lora(model):
    import peft

    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def untied(model):
    """Untie the head by hand; the configuration says that it is tied."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def with_own_head(model):
    model.lm_head = nn.Linear(32, VOCAB_SIZE, bias=True)
    return model


def hooked(model):
    """Train the rows of new tokens alone."""
    mask = torch.zeros(VOCAB_SIZE, 1)
    mask[VOCAB_SIZE // 2 :] = 1
    model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * mask)
    return model


class Scaled(nn.Module):
    """A block's feed-forward layers, scaled by a buffer that is saved with them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("scale", torch.full((32,), 0.5))

    def forward(self, hidden):
        return self.inner(hidden) * self.scale


def buffered(model):
    for layer in model.model.layers:
        layer.mlp = Scaled(layer.mlp)
    return model


def smooth_loss(outputs, labels, num_items_in_batch=None):
    """A loss of one's own: a sum over tokens, divided by the items of the whole batch."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, label_smoothing=0.2, reduction="sum") / num_items_in_batch


def rows_of(kind):
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_ROWS):
        tokens = torch.randint(1, VOCAB_SIZE, (LENGTH,), generator=generator).tolist()
        if kind == "labels":
            yield {"input_ids": tokens, "labels": tokens[0] % 2}
        elif kind == "packed":
            cut = 4 + tokens[0] % 8
            positions = [*range(cut), *range(LENGTH - cut)]
            yield {"input_ids": tokens, "labels": tokens, "position_ids": positions}
        else:
            yield {"input_ids": tokens, "labels": tokens}


MODELS = {
    "head": lambda: with_own_head(gpt2(tie_word_embeddings=False)),
    "lora": lambda: lora(llama()),
    "packed": llama,
    "labels": lambda: gpt2(GPT2ForSequenceClassification, num_labels=2),
    "mean": lambda: gpt2(MeanLoss),
    "untied": lambda: untied(llama(tie_word_embeddings=True)),
    "hooked": lambda: hooked(llama()),
    "buffered": lambda: buffered(llama()),
}
TRAINERS = {"sampler": OwnSampler, "weighted": WeightedSampler, "override": OwnSamples}


def main():
    kind = sys.argv[1]
    torch.manual_seed(1)
    trainer = TRAINERS.get(kind, Trainer)(
        model=MODELS.get(kind, gpt2)(),
        args=TrainingArguments(
            output_dir=sys.argv[2],
            per_device_train_batch_size=4 if kind == "loss" else 8,
            gradient_accumulation_steps=2 if kind == "loss" else 1,
            max_steps=16,
            learning_rate=3e-3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=list(rows_of(kind)),
        data_collator=default_data_collator,
        compute_loss_func=smooth_loss if kind == "loss" else None,
    )
    trainer.train()
    raise SystemExit("the lines after train() must not run")


if __name__ == "__main__":
    main()
