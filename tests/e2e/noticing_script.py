"""A script that ends by itself when it is asked to, and notes its steps, and how long it then has.

`noticing_script.py OUT`: it takes steps without end.
"""

from __future__ import annotations

import json
import os
import sys
import time

import oobleck.checkpoint

step, rank = 0, os.environ["RANK"]
with open(f"{sys.argv[1]}/log.{rank}", "a", encoding="utf-8") as log:
    while True:
        step, left_s = step + 1, oobleck.checkpoint.notice()
        said = {"step": step, "pid": os.getpid(), "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
        log.write(json.dumps({**said, "left_s": left_s}) + "\n")
        log.flush()
        if left_s is not None:
            time.sleep(0.5)  # it saves
            log.write(json.dumps({**said, "left_s": oobleck.checkpoint.notice(), "has_saved": True}) + "\n")
            sys.exit(0)
        time.sleep(0.05)
