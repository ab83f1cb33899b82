"""Checks with MindSpeed: they are run where there is one, and not shown elsewhere."""

import functools
import types
from typing import Any

import replay_patch
from replay_patch.errors import RouteError
from replay_patch.matrix import ascend_bed, tiny
from replay_patch.matrix.checks import padding, routing, schedules, sessions, tools
from replay_patch.matrix.checks.plugin import is_ours
from replay_patch.matrix.ranks import launch
from replay_patch.matrix.registry import Skip, check
from replay_patch.megatron import ascend, routers
from replay_patch.patching import probe
from replay_patch.patching.registry import patches
from replay_patch.patching.wrappers import chain

_PP2 = {"pipeline_model_parallel_size": 2}


@check("npu-repatch", every_patch=True, mindspeed=True)
def npu_repatch() -> None:
    """After `repatch()`, again and again, and after MindSpeed took its patches back and applied
    them, every patch is in place and a schedule records and replays."""
    _repatch()
    _in_place("repatch()")
    _repatch(moe_router_fusion=False)
    _in_place("a second repatch()")
    from mindspeed.patch_utils import MindSpeedPatchesManager

    MindSpeedPatchesManager.remove_patches()
    _in_place("remove_patches()")
    _repatch()
    MindSpeedPatchesManager.apply_patches()
    _in_place("apply_patches()")
    schedules.schedule()


@check("npu-targets", every_patch=True, mindspeed=True)
def npu_targets() -> None:
    """Each function that a patch changes may be replaced by MindSpeed, by one of the same code, and
    wrapped: afterwards ours is there, MindSpeed's is called by it, and a schedule replays."""
    from mindspeed.patch_utils import MindSpeedPatchesManager as Manager

    def live(target: str) -> Any:
        found = probe.find(target)
        return getattr(found, "__func__", found)

    ours = [p for p in patches() if not p.optional]
    targets = dict.fromkeys(t for p in ours for t in p.targets if is_ours(live(t)))
    targets = {t: None for t in targets if not is_ours([*chain(live(t))][-1])}  # not an addition
    assert len(targets) > 10, f"the plugin changes {list(targets)} only"
    states = _states()
    theirs: dict[str, Any] = {}
    for target in targets:
        original = [*chain(live(target))][-1]
        theirs[target] = types.FunctionType(
            original.__code__,
            original.__globals__,
            "of_mindspeed",
            original.__defaults__,
            original.__closure__,
        )
        theirs[target].__kwdefaults__ = original.__kwdefaults__
        dotted = target.replace(":", ".")
        taken = getattr(Manager.patches_info.get(dotted), "patch_func", None)
        Manager.register_patch(dotted, theirs[target], force_patch=taken is not None)
    for number in range(2):
        Manager.apply_patches()
        _in_place(f"replacing, and {number} wrappers")
        changed = {k: (v, _states()[k]) for k, v in states.items() if v != _states()[k]}
        assert not changed, f"states (before, now): {changed}"
        for target in targets:
            found = [*chain(live(target))]
            assert any(map(is_ours, found)), f"{target} is no longer ours"
            # A function may be several targets, all of which the last replacement has.
            assert found[-1] in theirs.values(), f"ours at {target} calls {found[-1]}"
            Manager.register_patch(target.replace(":", "."), _passing_wrapper)
    schedules.schedule()


def _passing_wrapper(function: Any) -> Any:
    @functools.wraps(function)
    def passing(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return passing


def _states() -> dict[str, str]:
    return {patch.name: patch.state for patch in replay_patch.status().patches}


@check("npu-unaligned", replays=True, ranks=2, mindspeed=True)
def npu_unaligned() -> None:
    """With MindSpeed's unaligned pipeline (`pipeline_num_transformer_layers`), the helpers answer
    for every stage, the model's layers have the numbers of the list, and a schedule replays."""
    for listed, virtual in (([[2], [1]], None), ([[2, 1], [1, 1]], 2)):
        _repatch(pipeline_num_transformer_layers=listed, **_PP2)
        options: dict[str, Any] = {"num_layers": sum(map(sum, listed))} | _PP2
        if virtual:
            options |= {"virtual_pipeline_model_parallel_size": virtual, **tiny.VPP_P2P}
        tools.on_ranks(_unaligned_rank, **options)


def _unaligned_rank(rank: int, world: int, init_file: str | None, options: dict[str, Any]) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    sessions.on_rank(rank, world, init_file, options)
    config = tools.config(**options)
    before, stages = 0, options.get("virtual_pipeline_model_parallel_size")
    for vp_stage in [None] if stages is None else range(stages):
        for pp_rank, counts in enumerate(config.pipeline_num_transformer_layers):
            where = {"vp_stage": vp_stage, "pp_rank": pp_rank}
            helpers = (get_transformer_layer_offset, get_num_layers_to_build)
            found = tuple(helper(config, **where) for helper in helpers)
            expected = before, counts[vp_stage or 0]
            assert found == expected, f"{where}: (offset, layers) is {found}, expected {expected}"
            before += expected[1]


@check("npu-noop-layers", replays=True, ranks=2, mindspeed=True)
def npu_noop_layers() -> None:
    """With MindSpeed's no-op layers, which have numbers and no router, a model's routers are in the
    layers that `local_layers` says, and a schedule replays."""
    options = {"num_layers": 4} | _PP2
    _repatch(noop_layers="0,3", **options)
    assert launch(_noop_rank, 2, (options,)) == [(2,), (3,)]
    with tools.mindspeed_may_fail("NoopTransformerLayer.forward() got an"):  # the map was right
        tools.on_ranks(sessions.on_rank, **options)


def _noop_rank(rank: int, world: int, init_file: str | None, options: Any) -> tuple[int, ...]:
    tiny.init(world, rank, init_file, **tools.group_sizes(options))
    config = tools.config(**options)
    found = tuple(routers.decoder_routers(tiny.model_chunks(config)[0]))
    helper = replay_patch.local_layers(config)
    assert found == helper, (
        f"rank {rank}: routers in the layers {found}, local_layers says {helper}"
    )
    return found


@check("npu-capacity", replays=True, mindspeed=True)
def npu_capacity() -> None:
    """Where MindSpeed replaces the top-k function for a capacity factor, routers replay as with
    Megatron's."""
    _repatch_alone(moe_expert_capacity_factor=1.0)
    routing.replay()


@check("npu-recompute", replays=True, mindspeed=True)
def npu_block_recompute() -> None:
    """MindSpeed's own block recompute sees the experts of its forward, and gives the gradients of a
    run without recompute, bitwise."""
    _repatch_alone(recompute_method="block")
    tiny.init()
    block = {"recompute_granularity": "full", "recompute_method": "block"}
    reference, calls = routing.train({})
    tiny.clear_aux_tracker()
    with tools.mindspeed_may_fail("transformer_block_checkpointed_forward() got an"):
        gradients, again = routing.train(block | {"recompute_num_layers": 2})
    assert (calls, again) == (2, 4), f"two routers ran {calls} times, and {again} with recompute"
    tools.all_same_bits(reference, gradients, "gradient of ")


@check("npu-mask", mindspeed=True)
def npu_block_mask() -> None:
    """MindSpeed's own block recompute sees the padding mask of its forward, too."""
    _repatch_alone(recompute_method="block")
    with tools.mindspeed_may_fail("transformer_block_checkpointed_forward() got an"):
        padding.block_recompute()


@check("npu-tp-extend-ep", replays=True, ranks=2, mindspeed=True)
def npu_tp_extend_ep() -> None:
    """With `tp_extend_ep`, whose routing sees the tokens of all tensor-parallel ranks, routers on
    two of them record and replay each its own rows; its experts, which are NPU kernels, stay
    out."""
    place = "megatron.core.transformer.moe.router:TopKRouter.routing"
    if "topk_softmax_with_capacity" not in probe.find(place).__code__.co_names:
        raise Skip("its routing calls a top-k function that this Megatron does not have")
    options = {"moe_token_dispatcher_type": "alltoall_seq", "moe_tp_extend_ep": True}
    options |= {"moe_permutation_async_comm": True, "moe_grouped_gemm": True}
    _repatch(num_experts=tools.EXPERTS, **options)
    replaced = probe.find(place).__name__
    assert replaced == "routing_tp_extend_ep", f"TopKRouter.routing is {replaced}"
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    tools.on_ranks(_routers_rank, num_layers=2, **sizes, **options)


def _routers_rank(rank: int, world: int, init_file: str | None, options: dict[str, Any]) -> None:
    import torch

    tiny.init(world, rank, init_file, **tools.group_sizes(options))
    config = tools.config(replay=False, **options)

    class Routers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            made = [tiny.router(config, number) for number in (1, 2)]
            self.routers = torch.nn.ModuleList(made)

        def forward(self, hidden: Any) -> Any:
            return [router(hidden) for router in self.routers]

    chunk, layout = Routers(), sessions.layout_of(config)
    rows = tools.SEQUENCE // world
    hidden = tools.hidden_states()[rank * rows : (rank + 1) * rows]
    with replay_patch.recording(chunk) as record:
        record.load(chunk, layout)
        native = [routing_map for _, routing_map in chunk(hidden)]
    given = sessions.other_routes((1, 2))[: len(sessions.LENGTHS)]
    with replay_patch.replaying(chunk) as replay:
        replay.load(chunk, given, layout)
        found = [routing_map for _, routing_map in chunk(hidden)]
    for what, routes, maps in (("recorded", record.routes(), native), ("replayed", given, found)):
        for number, routing_map in enumerate(maps, start=1):
            wanted = sessions.wanted_maps(routes, 0, number, layout)
            real = wanted.any(1)
            assert real.any(), f"rank {rank}: no row has a route"
            tools.same_map(wanted[real], routing_map[real], f"{what}, rank {rank}, layer {number}")


@check("npu-refusals", mindspeed=True)
def npu_refusals() -> None:
    """Each feature of MindSpeed's that replay cannot work with, or was not tested with, is refused
    by name: when a router with replay on is built, and when a session begins."""
    tiny.init()
    model = tiny.gpt_model(tools.config(replay=False))
    config = tools.config()
    for feature in ascend.REFUSED:
        for option in feature.options:
            argument = option.strip("-").replace("-", "_")
            before = getattr(config, argument, None)
            for held in (model.config, config):
                setattr(held, argument, feature.value or True)
            with tools.refused(f"a session with {option}", RouteError, option):
                replay_patch.recording(model).__enter__()
            with tools.refused(f"a router with {option}", RouteError, option):
                tiny.router(config)
            for held in (model.config, config):
                setattr(held, argument, before)
    with replay_patch.recording(model):  # with all of them off
        pass


def _repatch(**arguments: Any) -> None:
    if not ascend_bed.repatch(**arguments):
        raise Skip("this MindSpeed has no repatch: its features are chosen on a command line")


def _repatch_alone(**arguments: Any) -> None:
    """Switch on MindSpeed's features for these arguments, without giving them to every config."""
    _repatch(**arguments)
    vars(ascend_bed.mindspeed_args()).update(dict.fromkeys(arguments))


def _in_place(after: str) -> None:
    wrong = replay_patch.status().problems
    assert not wrong, f"after {after}: {wrong}"
