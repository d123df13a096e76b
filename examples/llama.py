"""A Llama on text of one's own: `oobleck up --local 4 examples/llama.py -- --hidden-size 512 --text corpus/`"""

from __future__ import annotations

import argparse

from transformers import TrainerCallback

from oobleck import Job


class Report(TrainerCallback):
    """What it prints goes to script.log in the run's directory."""

    def on_log(self, args, state, control, logs, **kwargs):
        print(f"step {state.global_step}: {logs}")

    def on_recovery(self, args, state, control, text, **kwargs):
        print(f"after step {state.global_step}: {text}")


def job() -> Job:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden-size", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--text", nargs="*", default=[], help="files or directories; none: Python's own sources")
    options = parser.parse_args()
    return Job(
        run_name="llama",
        model={
            "type": "llama",
            "hidden_size": options.hidden_size,
            "intermediate_size": 8 * options.hidden_size // 3,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.hidden_size // 64 or 1,
            "num_key_value_heads": options.hidden_size // 64 or 1,
        },
        data={"paths": options.text, "validation_split": 0.02},
        learning_rate=6e-4,
        warmup_steps=20,
        max_steps=options.steps,
        global_batch_size=8,
        per_device_train_batch_size=1,
        eval_steps=40,
        max_eval_samples=32,
        callbacks=[Report()],
    )
