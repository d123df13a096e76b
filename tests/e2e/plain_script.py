"""A script that needs nothing but torchrun's variables: it notes its steps until it has taken so many."""

import json
import os
import sys
import time

out, steps = sys.argv[1], int(sys.argv[2])
for step in range(1, steps + 1):
    with open(f"{out}/log.{os.environ['RANK']}", "a") as file:
        said = {"step": step, "pid": os.getpid(), "world": int(os.environ["WORLD_SIZE"])}
        file.write(json.dumps({**said, "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}) + "\n")
    time.sleep(0.02)
