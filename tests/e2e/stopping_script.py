"""A script whose callbacks stop training: `stopping_script.py CASE OUTPUT`. What came of it is written to OUTPUT.

Its steps take milliseconds, so that workers which wait for nobody would do some more.
"""

import json
import sys

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from oobleck.transformers import Trainer

LENGTH = 8
TIMES = ("runtime", "per_second")


class Stopping(TrainerCallback):
    """Stops training in an event, from a step on."""

    def __init__(self, event, step):
        def stop(args, state, control, **details):
            if state.global_step >= step:
                control.should_training_stop = True

        setattr(self, event, stop)


CASES = {
    "step": ({"logging_steps": 1}, Stopping("on_step_end", 7)),
    "log": ({"logging_steps": 3}, Stopping("on_log", 4)),
    "begin": ({"logging_steps": 1}, Stopping("on_train_begin", 0)),
    # A loss that falls does not improve here.
    "early": (
        {
            "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss",
            "greater_is_better": True,
        },
        EarlyStoppingCallback(1),
    ),
    "epoch": ({"logging_strategy": "epoch", "eval_strategy": "epoch"}, Stopping("on_step_end", 6)),
}  # fmt: skip


def main():
    case, output = sys.argv[1:]
    values, callback = CASES[case]
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=300, n_embd=16, n_layer=4, n_head=2, n_positions=LENGTH, bos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    rows = [{"input_ids": [(7 * n + k) % 300 for k in range(LENGTH)]} for n in range(32)]
    samples = [{**row, "labels": [-100, *row["input_ids"][1:]]} for row in rows]
    trainer = Trainer(
        model=GPT2LMHeadModel(config).double(),
        args=TrainingArguments(
            output_dir=f"{output}.out", run_name="e2e", max_steps=40, per_device_train_batch_size=8,
            learning_rate=1e-2, save_strategy="no", report_to=[], use_cpu=True, **values,
        ),
        train_dataset=samples,
        eval_dataset=samples[:8] if "eval_strategy" in values else None,
        data_collator=default_data_collator,
        callbacks=[callback],
    )  # fmt: skip
    done = trainer.train()
    logs = [
        {name: value for name, value in entry.items() if not name.endswith(TIMES) and name != "total_flos"}
        for entry in trainer.state.log_history
    ]
    found = {
        "global_step": done.global_step,
        "epoch": trainer.state.epoch,
        "logs": logs,
        "weights": [float(each.detach().square().sum()) for each in trainer.model.parameters()],
    }
    with open(output, "a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
