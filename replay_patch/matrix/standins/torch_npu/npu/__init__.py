"""torch.npu, which answers as torch.cuda does."""

import torch

device = torch.cuda.device  # a context manager; never entered on a CPU


def _lazy_call(function, **_):
    return None


def get_device_name(*_):
    return "Ascend910B"


class mstx:
    @staticmethod
    def range_start(*_, **__):
        return 0

    range_end = mark = range_start


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(torch.cuda, name)
