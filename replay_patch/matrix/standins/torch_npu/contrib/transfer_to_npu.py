"""The real one redirects torch.cuda to torch.npu, and disables torch.jit.script as this does."""

import torch

torch.jit.script = lambda obj, *args, **kwargs: obj
