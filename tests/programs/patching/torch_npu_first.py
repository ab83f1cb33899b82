"""A job that imports torch_npu first; for tests/release/patching/test_torch_npu_first.py.

    python torch_npu_first.py [auto]        # auto: it imports replay_patch.auto before

A script, because all is in the order of its imports. It prints [active, trigger, problems, how a
session on a model without routers is refused].
"""

import sys

if "auto" in sys.argv:
    import replay_patch.auto
import torch_npu  # isort: skip
import torch  # isort: skip
from replay_patch.megatron import no_triton

no_triton.provide()
import json

import torch_npu.contrib.transfer_to_npu
from megatron.core.models.gpt import GPTModel

import replay_patch

status = replay_patch.status()
try:
    replay_patch.recording(torch.nn.Linear(1, 1))
except Exception as error:
    refused = f"{type(error).__name__}: {error}"
print(json.dumps([status.active, status.trigger, status.problems, refused]))
