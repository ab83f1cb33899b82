"""What a Megatron config says about the router, read the same way on every release.

Each reader works with fields under either of their names, with a field that the release lacks,
with a config whose class MindSpeed has rebuilt, and with "true"/"false" from a command line.
"""

from typing import Any

from replay_patch.settings import parse_switch

REPLAY_FIELDS = ("enable_routing_replay", "moe_enable_routing_replay")
"""The name trainers used first, and Megatron's own from 0.16 on."""


def replay_enabled(config: Any) -> bool:
    """Whether routing replay is on: either name is enough.
    Raises SettingsError for a string that is neither on nor off."""
    return any(_switch(config, name) for name in REPLAY_FIELDS)


def router_fusion(config: Any) -> bool:
    """Whether Transformer Engine's fused router is asked for (a field from 0.14 on)."""
    return _switch(config, "moe_router_fusion")


def router_padding(config: Any) -> bool:
    """Whether the dispatcher pads the routing map for low precision: `moe_router_padding_for_fp8`
    in 0.13 ... 0.15, `moe_router_padding_for_quantization` from 0.16 on; 0.12 has neither."""
    names = ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
    return any(_switch(config, name) for name in names)


def router_cuda_graph(config: Any) -> str | None:
    """The config field by which the router runs inside a CUDA graph, or None if it does not.
    `enable_cuda_graph` and `external_cuda_graph` (0.12 on), `cuda_graph_impl` (0.15 on); what is
    inside is `cuda_graph_scope`, from 0.18 on `cuda_graph_modules`."""
    on = [n for n in ("enable_cuda_graph", "external_cuda_graph") if getattr(config, n, False)]
    implementation = getattr(config, "cuda_graph_impl", None) or "none"
    if implementation != "none":
        on.append("cuda_graph_impl")
    if not on:
        return None
    scope = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None)
    local = "enable_cuda_graph" in on or implementation == "local"
    if isinstance(scope, str) and local:
        return on[0]  # before 0.16 a local graph holds whole layers, whatever the scope says
    scopes = scope if isinstance(scope, (list, tuple)) else [scope]
    inside = {str(getattr(s, "name", s)) for s in scopes if s is not None}
    with_router = {"full", "full_iteration", "moe", "moe_router", "moe_preprocess"}
    if implementation != "full_iteration" and inside and not inside & with_router:
        return None
    return on[0]


def _switch(config: Any, name: str) -> bool:
    value = getattr(config, name, False)
    return parse_switch(value, name) if isinstance(value, str) else bool(value)
