from __future__ import annotations

import torch

# The models here are so small that threads would spend their time waiting for one another.
torch.set_num_threads(1)
