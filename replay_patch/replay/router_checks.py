"""Routers and circumstances in which a replay would be ignored or wrong; each raises RouteError."""

from typing import Any

import torch

from replay_patch.errors import RouteError
from replay_patch.patching import probe
from replay_patch.refusals import Where, installed_megatron, refuse

_TOP_K_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"


def refuse_unknown_class(cls: Any) -> None:
    """Refuse a subclass of Megatron's Router that would ignore its replay object."""
    if not issubclass(cls, probe.find(_TOP_K_ROUTER)):
        expected = "a TopKRouter"
    elif not _reaches_top_k_router(cls.forward):
        expected = "its forward to call TopKRouter.forward"
    else:
        return
    raise RouteError(
        f"{installed_megatron()}: router class {cls.__module__}.{cls.__qualname__} with routing "
        f"replay on; expected {expected}, because replay would be ignored. Derive it so, or "
        "switch replay off"
    )


def check_selecting(router: Any) -> None:
    """Refuse a router that does not select by top-k."""
    if router.routing_type in ("sinkhorn", "quantile_balancing"):
        refuse(
            f"moe_router_load_balancing_type={router.routing_type!r}",
            "a router that selects by top-k; that one cannot be recorded or replayed",
            Where.of(getattr(router, "router_replay", None) or router),
        )


def check_capture(router: Any = None) -> None:
    """Refuse to replay while a graph is being captured, on a GPU or an NPU.
    The message names the router, given by itself or by its replay object."""
    # torch_npu's transfer_to_npu puts into torch.cuda what torch.npu has. What an older torch.npu
    # lacks stays torch.cuda's own, which raises in a torch without CUDA.
    backends: Any = torch.backends
    cuda = torch.cuda if backends.cuda.is_built() else None
    accelerators: Any = (cuda, getattr(torch, "npu", None))
    for accelerator in accelerators:
        capturing = getattr(accelerator, "is_current_stream_capturing", None)
        if capturing is not None and accelerator.is_initialized() and capturing():
            refuse(
                "a CUDA or NPU graph is being captured around a replaying router",
                "no graph: it would replay the ids of the capture for ever",
                None if router is None else Where.of(router),
            )


def _reaches_top_k_router(forward: Any) -> bool:
    """Whether a router's forward is, or can call, the TopKRouter.forward that is patched."""
    code = getattr(forward, "__code__", None)
    return hasattr(forward, "__wrapped__") or (
        code is not None
        and "forward" in code.co_names
        and ("__class__" in code.co_freevars or "TopKRouter" in code.co_names)
    )
