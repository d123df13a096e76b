"""Commands of the pages and of `--help` that test_commands.py gives to a run."""

from __future__ import annotations

__all__ = ["AFTERWARDS", "ON_A_RUN", "WHILE_IT_TRAINS"]

WHILE_IT_TRAINS = (
    "oobleck status",
    "oobleck status --json",
    "oobleck status gpt2-demo --json",
    "oobleck kill node2",
    "oobleck add node2",
    "oobleck add node4",
    "oobleck add node7",
    "oobleck drain node1",
    "oobleck drain node2",
    "oobleck chaos trace.json --tag gpt2-demo --speedup 60",
    "oobleck events gpt2-demo --follow",
    "oobleck stop",
)
AFTERWARDS = (
    "oobleck events",
    "oobleck events gpt2-demo --json",
    "oobleck report",
    "oobleck report gpt2-demo -o report.html",
    "oobleck checkpoint list",
    "oobleck checkpoint list gpt2-demo",
    "oobleck checkpoint inspect gpt2-demo",
    "oobleck checkpoint verify gpt2-demo",
    "oobleck checkpoint export gpt2-demo model/",
    "oobleck checkpoint export gpt2-demo model/ --format hf",
    "oobleck checkpoint import model/ imported/",
)
ON_A_RUN = (*WHILE_IT_TRAINS, *AFTERWARDS)
