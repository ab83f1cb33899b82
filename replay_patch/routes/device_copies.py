"""Copies from the host to a device for which the host does not wait."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy to the device that nothing waits for; the tensor itself on the host."""
    if device.type == "cpu":
        return tensor
    try:
        pinned = tensor.pin_memory()
    except Exception:  # noqa: BLE001 - none for this kind of device, or none left: then it waits
        # torch_npu would read memory that is not pinned later, when it is another tensor's.
        return tensor.to(device)
    return pinned.to(device, non_blocking=True)
