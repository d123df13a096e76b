"""A script of transformers' Trainer with one changed import: `oobleck up --local 4 examples/trainer.py`

It runs by plain `python examples/trainer.py` too, on the devices of this machine.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, default_data_collator

from oobleck.transformers import Trainer  # was: from transformers import Trainer

LENGTH, BYTES = 128, 257


class Report(TrainerCallback):
    """An ordinary callback, and one event more."""

    def on_recovery(self, args, state, control, text, **kwargs):
        print(f"after step {state.global_step}: {text}")


def rows(num_files: int) -> list[dict[str, list[int]]]:
    """The bytes of Python's own sources, cut into rows: a token is a byte."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]
    text = b"\n".join(file.read_bytes() for file in files)
    cut = (list(text[at : at + LENGTH]) for at in range(0, len(text) - LENGTH, LENGTH))
    return [{"input_ids": row, "labels": row} for row in cut]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--output", default="trained")
    options = parser.parse_args()
    size = {"n_embd": 64 * options.layers, "n_layer": options.layers, "n_head": options.layers, "n_positions": LENGTH}
    everything = rows(options.files)
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=BYTES, bos_token_id=256, eos_token_id=256, **size)),
        args=TrainingArguments(
            output_dir=options.output,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            learning_rate=6e-4,
            warmup_steps=20,
            lr_scheduler_type="cosine",
            weight_decay=0.1,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=40,
            report_to=[],
        ),
        train_dataset=everything[64:],
        eval_dataset=everything[:64],
        data_collator=default_data_collator,
        callbacks=[Report()],
    )
    trainer.train()  # on the nodes; what follows runs once, here
    print(f"eval_loss after training: {trainer.evaluate()['eval_loss']:.3f}")
    trainer.save_model()


if __name__ == "__main__":
    main()
