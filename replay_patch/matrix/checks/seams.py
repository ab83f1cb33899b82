"""Checks aimed at one patch each: they need no other one."""

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from replay_patch.errors import RouteError
from replay_patch.matrix import tiny
from replay_patch.matrix.checks import tools
from replay_patch.matrix.checks.plugin import FLAGS
from replay_patch.matrix.registry import Skip, check


@check("config-names")
def config_names() -> None:
    """Every config class of this release has the replay flags, off, as real fields."""
    from megatron.core.transformer import transformer_config

    root = transformer_config.TransformerConfig
    everything: list[Any] = list(vars(transformer_config).values())
    for cls in [c for c in everything if isinstance(c, type) and issubclass(c, root)]:
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for flag in FLAGS:
            assert flag in fields, f"{cls.__name__} has no field {flag}"
            default = getattr(cls, flag)
            assert default is False, f"{cls.__name__}.{flag} is {default!r} by default"
        config = cls(
            num_layers=2, hidden_size=16, num_attention_heads=2, **dict.fromkeys(FLAGS, False)
        )
        assert not any(getattr(config, flag) for flag in FLAGS)


@check("aux-loss-method")
def aux_loss_method() -> None:
    """`TopKRouter.is_aux_loss_enabled()` answers, and the release's own auxiliary loss reaches the
    router's weight."""
    import torch

    tiny.init()
    for kind, coefficient, expected in (("aux_loss", 1e-2, True), ("none", 0.0, False)):
        options = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": coefficient}
        router = tiny.router(tiny.moe_config(**options)).train()
        found = router.is_aux_loss_enabled()
        assert found is expected, f"is_aux_loss_enabled() is {found} with {kind}, {coefficient}"
        probs, _ = router(tools.hidden_states())
        (probs * torch.zeros_like(probs)).sum().backward()  # leaves the auxiliary loss alone
        touched = bool(router.weight.grad.any())
        assert touched is expected, f"the gradient of {kind} is {'there' if touched else 'missing'}"


@check("layer-map")
def layer_map() -> None:
    """`get_transformer_layer_offset` and `get_num_layers_to_build` answer for any stage, without
    process groups; over all stages each layer appears once, in the order of the model."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    uneven = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 2}
    cases: list[tuple[int, int, int | None, dict[str, Any]]] = [
        (8, 1, None, {}),
        (8, 4, None, {}),
        (8, 2, 2, {}),
        (10, 3, None, uneven),
        (12, 3, 2, uneven | {"num_layers_in_first_pipeline_stage": 4}),
        (14, 3, 2, {"num_layers_in_last_pipeline_stage": 2}),  # overlaps in 0.12, 0.13
    ]
    layout = [["embedding", "decoder"], ["decoder"] * 3, ["decoder", "loss"]]
    if "pipeline_model_parallel_layout" in TransformerConfig.__dataclass_fields__:  # from 0.13.1 on
        cases.append((5, 3, None, {"pipeline_model_parallel_layout": layout}))
    for layers, pp, vpp, options in cases:
        # That of core 0.17 and 0.18 reads a layout as a string after it was parsed.
        with tools.mindspeed_may_fail("'PipelineParallelLayerLayout' object has no attribute"):
            config = tools.staged_config(layers, pp, vpp, **options)
        found: list[int] = []
        for vp_stage in [None] if vpp is None else range(vpp):
            for pp_rank in range(pp):
                where = {"vp_stage": vp_stage, "pp_rank": pp_rank}
                offset = get_transformer_layer_offset(config, **where)
                found += range(offset, offset + get_num_layers_to_build(config, **where))
        assert found == list(range(layers)), (
            f"{layers} layers on {pp} pipeline ranks, {vpp or 'no'} virtual stages, {options}: the "
            f"stages hold {found}"
        )


@check("replay-api")
def replay_api() -> None:
    """`megatron.core.transformer.moe.router_replay` is importable; its objects take ids of any
    integer dtype, and refuse those that cannot be right."""
    import torch
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    replay = RouterReplay()
    assert replay in RouterReplay.global_router_replay_instances
    replay.num_experts, replay.topk = tools.EXPERTS, tools.TOPK
    # Not by set_router_replay_action(), which asks whether every patch is in place.
    replay.router_replay_action = RouterReplayAction.REPLAY_FORWARD
    scores, wanted = torch.randn(tools.TOKENS, tools.EXPERTS), tools.some_ids()
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        replay.set_target_indices(wanted.to(dtype))
        values, ids = replay.get_replay_topk(
            scores, tools.TOPK, default_compute_topk=tools.native_topk
        )
        assert torch.equal(ids, wanted), f"{dtype} ids come back as others"
        assert torch.equal(values, scores.gather(1, wanted)), f"{dtype} ids: other values"
    for what, bad in {
        "an id beyond the last expert": wanted + tools.EXPERTS,
        "a column too many": tools.some_ids(topk=tools.TOPK + 1),
        "float ids": wanted.float(),
    }.items():
        with tools.refused(what, RouteError):
            replay.set_target_indices(bad)
    replay.set_target_indices(wanted[:-1])
    with tools.refused("a row too few", RouteError):
        replay.get_replay_topk(scores, tools.TOPK, default_compute_topk=tools.native_topk)


@check("topk-seam")
def topk_seam() -> None:
    """Before 0.16: the release's own top-k function takes the ids of the router that runs, and
    chooses itself when none does."""
    import torch

    from replay_patch.replay.router_call import replay_at_work
    from replay_patch.replay.router_replay import RouterReplay, RouterReplayAction

    function = tools.topk_function()
    if "router_replay" in inspect.signature(function).parameters:
        raise Skip("this release's top-k function takes router_replay itself")
    replay: Any = RouterReplay()
    replay.router_replay_action = RouterReplayAction.REPLAY_FORWARD
    replay.target_topk_idx = tools.some_ids()
    logits = torch.randn(tools.TOKENS, tools.EXPERTS)
    with replay_at_work.during(replay):
        replayed = function(logits, tools.TOPK)[1]
    native = function(logits, tools.TOPK)[1]
    tools.same_map(tools.as_map(replay.target_topk_idx), replayed, "with a router that replays")
    tools.same_map(tools.as_map(tools.native_topk(logits, tools.TOPK)[1]), native, "without one")


@check("fused-seam")
def fused_seam() -> None:
    """From 0.16 on: `fused=True` with a replaying router takes the router's ids, not the fused
    kernel's."""
    import torch

    function = tools.topk_function()
    if "router_replay" not in inspect.signature(function).parameters:
        raise Skip("this release's top-k function takes no router_replay; see fused-router")
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    tools.provide_fused_kernel()
    replay: Any = RouterReplay()
    replay.layer_number, replay.mtp_depth = 3, 0
    replay.router_replay_action = RouterReplayAction.REPLAY_FORWARD
    replay.target_topk_idx = tools.some_ids()
    logits = torch.randn(tools.TOKENS, tools.EXPERTS)
    routing_map = function(logits, tools.TOPK, fused=True, router_replay=replay)[1]
    tools.same_map(tools.as_map(replay.target_topk_idx), routing_map, "with fused=True")


@check("router-objects")
def router_objects() -> None:
    """Every router says whether it has a replay object, and the words "true" and "false" of a
    command line are no truth values by accident."""
    tiny.init()
    config = tiny.moe_config()
    config.moe_router_fusion = "false"
    router = tiny.router(config)
    assert router.router_replay is None, f"replay is off, but router_replay={router.router_replay}"
    found = config.moe_router_fusion
    assert found is False, f"moe_router_fusion='false' stays {found!r}"


@check("mtp-depth")
def mtp_depth() -> None:
    """The replay objects of multi-token-prediction blocks know which block they are in."""
    from megatron.core.transformer.moe.router import TopKRouter

    tiny.init()
    with _with_replay_objects(TopKRouter):
        model = tiny.gpt_model(tiny.moe_config(mtp_num_layers=2))
    found = [
        [m.router_replay.mtp_depth for m in layer.modules() if isinstance(m, TopKRouter)]
        for layer in model.mtp.layers
    ]
    assert found == [[1], [2]], f"the depths of two blocks are {found}, expected [[1], [2]]"


@check("guard")
def guard() -> None:
    """A router class in which replay would be ignored is refused when it is built with it on."""
    from megatron.core.transformer.moe.router import TopKRouter

    class Own(TopKRouter):  # type: ignore[misc]
        """Never reaches TopKRouter.forward."""

        def forward(self, input: Any) -> Any:
            return self.routing(self.gating(input))

    tiny.init()
    config = tiny.moe_config()
    config.enable_routing_replay = True
    with tools.refused("a router with a forward of its own"):
        Own(config=config, **tiny.moe_groups(Own))


@contextlib.contextmanager
def _with_replay_objects(cls: Any) -> Iterator[None]:
    """Give each router that is built a stand-in for a replay object."""
    original: Callable[..., None] = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.router_replay = types.SimpleNamespace(mtp_depth=0)

    cls.__init__ = __init__
    try:
        yield
    finally:
        cls.__init__ = original
