"""Without this patch verl finds the routers of a stage by their places in a list of all routers:
each may get the experts of another layer, and nothing says so."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from replay_patch.errors import RouteError
from replay_patch.megatron.config import replay_enabled
from replay_patch.patches.verl._passes import replay_objects
from replay_patch.patching import Patch, Transaction, probe
from replay_patch.refusals import installed_megatron

_MODULE = "verl.utils.megatron.router_replay_utils"
_LIST = f"{_MODULE}:RouterReplayHelper.get_micro_batch_router_list"
_SET = f"{_MODULE}:set_router_replay_data"


def _needed() -> tuple[bool, str]:
    positional = "router_instances" in probe.names_used(_LIST)
    return positional, f"the helper {'slices' if positional else 'does not slice'} a list"


def _apply(transaction: Transaction) -> None:
    helper = probe.find(f"{_MODULE}:RouterReplayHelper")
    transaction.wrap(helper, "get_micro_batch_router_list", _router_list_by_layer)
    if "index_by_layer" not in probe.names_used(_SET):  # 0.7.0
        module = sys.modules[_MODULE]
        transaction.set(module, "set_router_replay_data", _reordering_set_replay_data(module))


def _layers(tf_config: Any, vp_rank: int | None) -> tuple[int, ...]:
    """The MoE layers of this stage; verl's `vp_rank` may be None, and 0 without virtual stages."""
    from replay_patch.megatron.local_layers import local_layers

    virtual = getattr(tf_config, "virtual_pipeline_model_parallel_size", None)
    return local_layers(tf_config, vp_stage=(vp_rank or 0) if virtual else None)


def _router_list_by_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    from replay_patch.replay import router_replay

    def get_micro_batch_router_list(tf_config: Any, vp_rank: int | None = None) -> list[Any]:
        if not replay_enabled(tf_config):  # a critic or reference, beside an actor of other layers
            return []
        entries = replay_objects.get()
        if entries is None:
            entries = [e for e in router_replay.instances() if not e.mtp_depth]
        if not entries:
            return []
        layers = _layers(tf_config, vp_rank)
        by_layer: dict[int, list[Any]] = {}
        for entry in entries:
            by_layer.setdefault(entry.layer_number, []).append(entry)
        wrong = {n: len(by_layer.get(n, ())) for n in layers if len(by_layer.get(n, ())) != 1}
        if wrong:
            raise RouteError(
                f"{installed_megatron()}, verl: the layers of this stage are {layers}, and of "
                f"these have another number of routers with replay on than one: {wrong} (layer: "
                "routers); expected one model with replay on in a process of this verl, which "
                "asks for routers without saying of which model. Switch replay off for the others "
                "(reference, critic), or put them into other processes"
            )
        return [by_layer[number][0] for number in layers]

    return get_micro_batch_router_list


def _reordering_set_replay_data(module: Any) -> Callable[..., None]:
    """For 0.7.0, which takes layer i + (layers before this stage) of the data for router i."""
    from replay_patch.megatron.layer_placement import moe_layers

    original = module.set_router_replay_data

    @functools.wraps(original, updated=())
    def set_router_replay_data(
        layers_topk_idx: Any, attention_mask: Any, tf_config: Any, vp_rank: int | None = None
    ) -> None:
        routed_layers = int(layers_topk_idx.shape[2])
        all_moe = moe_layers(tf_config)
        axis = list(range(1, int(tf_config.num_layers) + 1))
        if routed_layers != len(axis):
            axis = list(all_moe)
        if routed_layers != len(axis):
            raise RouteError(
                f"{installed_megatron()}, verl: routes of {routed_layers} layers; expected all "
                f"{tf_config.num_layers}, or the {len(all_moe)} MoE layers"
            )
        layers = _layers(tf_config, vp_rank)
        start = module.get_current_rank_layer_info(tf_config, vp_rank)["start"]
        order = [0] * start + [axis.index(number) for number in layers]
        original(layers_topk_idx[:, :, order], attention_mask, tf_config, vp_rank)

    return set_router_replay_data


PATCH = Patch(
    name="verl_router_lists",
    library="verl",
    targets=(_LIST, _SET),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "verl slices the list of all routers by layer counts: with routers of another model, of a "
        "decoder that was built twice or of MTP blocks in it, every router gets another layer's "
        "experts, and 0.7 and 0.8 do not notice. 0.7.0 also counts dense layers as routers, and "
        "takes the routes of the layers in front of the stage's."
    ),
    how=(
        "`get_micro_batch_router_list` picks the routers whose layer numbers are those of "
        "`local_layers`: of the model whose pass is running (verl_engine_pass), else of all that "
        "there are, and refuses if a layer has none or several. On 0.7.0 the layer axis of "
        "the routes is put into the order in which `set_router_replay_data` reads it."
    ),
    upstream="none known: verl 0.9.1 still goes by places in its list of routers",
    remove_when="no supported verl goes by places in a list",
    needed=_needed,
    apply=_apply,
)
