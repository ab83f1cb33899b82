"""Copies from the host to a device for which the host does not wait."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, for which the host does not wait; on the CPU the tensor itself."""
    if device.type == "cpu":
        return tensor
    try:
        pinned = tensor.pin_memory()
    except Exception:  # noqa: BLE001 - none for this kind of device, or none left: then it waits
        # Waits: torch_npu would read unpinned memory later, when it is another tensor's.
        return tensor.to(device)
    return pinned.to(device, non_blocking=True)
