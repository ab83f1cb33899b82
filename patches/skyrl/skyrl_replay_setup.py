"""Without this patch SkyRL's routes of a microbatch come to the wrong rows and the wrong routers,
and tokens without a route are all sent to expert 0; nothing says so."""

import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from replay_patch.errors import RouteError
from replay_patch.patches.skyrl._batches import (
    REPLAY_BACKWARD,
    REPLAY_FORWARD,
    REPLAY_MODULE,
    check_form,
    microbatch,
)
from replay_patch.patching import Patch, probe, wrappers_at
from replay_patch.refusals import installed_megatron

_FORWARD, _BACKWARD = f"{REPLAY_MODULE}:{REPLAY_FORWARD}", f"{REPLAY_MODULE}:{REPLAY_BACKWARD}"


def _needed() -> tuple[bool, str]:
    import torch

    split = probe.find(f"{REPLAY_MODULE}:_split_replay_indices")
    if split is not None:
        [rows] = split(torch.arange(4).view(2, 2, 1, 1))  # two sequences of two positions
        if rows.flatten().tolist() == [0, 2, 1, 3] and not _takes_routers_by_position():
            return False, "routes are in the order of the router rows, and routers by layer"
    check_form()
    return True, "routes are flattened sequence after sequence, and routers go by places in a list"


def _takes_routers_by_position() -> bool:
    functions = filter(inspect.isfunction, vars(sys.modules[REPLAY_MODULE]).values())
    return any("global_router_replay_instances" in probe.names_used(each) for each in functions)


def _set_up_forward(
    rollout_expert_indices: Any,
    attention_mask: Any,
    model_config: Any,
    remove_microbatch_padding: bool = False,
) -> None:
    """Let the routers of this stage replay one microbatch, until the next call. It is for code that
    drives models by itself: SkyRL's own schedules do not call it (skyrl_replay_schedule)."""
    from replay_patch.megatron.layer_placement import moe_layers
    from replay_patch.megatron.local_layers import local_layers
    from replay_patch.megatron.parallel_ranks import ParallelRanks
    from replay_patch.replay import target_ids
    from replay_patch.replay.router_replay import MODULE, instances
    from replay_patch.routes import RouteBatch
    from replay_patch.routes.device_copies import to_device
    from replay_patch.sessions.microbatch import router_rows

    action = importlib.import_module(MODULE).RouterReplayAction.REPLAY_FORWARD
    if (getattr(model_config, "virtual_pipeline_model_parallel_size", None) or 1) > 1:
        raise RouteError(
            f"{installed_megatron()}, SkyRL's {REPLAY_FORWARD}: the model has virtual pipeline "
            "stages, and the call does not say which of them it is for; expected a schedule of "
            "MegatronModelWrapper's, or a replay_patch.replaying() block, which know"
        )
    layers = local_layers(model_config)
    entries = _entries(layers)
    routes, layout = microbatch(
        rollout_expert_indices, attention_mask, model_config, remove_microbatch_padding, layers
    )
    rows = RouteBatch(routes).to_rows(
        layout,
        layers,
        moe_layers(model_config),
        model_config.num_layers,
        rows=router_rows(layout, model_config),
        ep_size=model_config.expert_model_parallel_size,
        first_padding=ParallelRanks.of(model_config).data_rank * model_config.moe_router_topk,
    )
    device = rollout_expert_indices.device
    expert_ids = to_device(rows.expert_ids, device)
    replayed = to_device(~rows.holes, device) if bool(rows.holes.any()) else None
    for entry, ids in zip(entries, expert_ids, strict=True):
        entry.set_target_indices(
            ids if replayed is None else target_ids.with_native_rows(ids, replayed, entry)
        )
        if getattr(model_config, "recompute_granularity", None) is None:
            entry.replay_backward_list.clear()  # nothing will ask for it
    for entry in instances():
        if any(entry is replaying for replaying in entries):
            entry.set_router_replay_action(action)
        else:  # an MTP block: no engine captures its routes
            entry.clear_router_replay_action()


def _set_up_backward() -> None:
    """From now on a router call is the recompute of the oldest forward that had none."""
    from replay_patch.replay.router_replay import MODULE, instances

    action = importlib.import_module(MODULE).RouterReplayAction.REPLAY_BACKWARD
    for entry in instances():
        if entry.target_topk_idx is not None:
            entry.set_router_replay_action(action)


def _entries(layers: Sequence[int]) -> list[Any]:
    from replay_patch.replay.router_replay import instances

    by_layer: dict[Any, list[Any]] = {number: [] for number in layers}
    for entry in instances():
        if not entry.mtp_depth:
            by_layer.setdefault(entry.layer_number, []).append(entry)
    wrong = {number: len(routers) for number, routers in by_layer.items() if len(routers) != 1}
    if wrong or len(by_layer) > len(layers):
        raise RouteError(
            f"{installed_megatron()}, SkyRL's {REPLAY_FORWARD}: the MoE layers of this stage are "
            f"{tuple(layers)}, and routers with replay on are in {sorted(by_layer, key=str)} "
            f"(not one for a layer: {wrong}); expected one model with replay on in a process. "
            "Switch replay off for the others, or run each by MegatronModelWrapper, or with "
            "replay_patch.replaying()"
        )
    return [by_layer[number][0] for number in layers]


PATCH = Patch(
    name="skyrl_replay_setup",
    library="skyrl",
    targets=(_FORWARD, _BACKWARD),
    modules=(REPLAY_MODULE,),
    requires="skyrl",
    why=(
        "SkyRL flattens routes sequence after sequence, and Megatron's rows are position after "
        "position: with several unpacked sequences all tokens get others' experts. It takes its "
        "routers by place if their number is the stage's number of layers: with one dense layer "
        "and one MTP block each router gets its neighbour's. It cuts rows for tensor parallelism "
        "where there is no sequence parallelism, and sends all tokens without a route, and all "
        "padding, to expert 0. None of it says a word."
    ),
    how=(
        "Rows by `TokenLayout`, routers by layer number; MTP blocks stay native; tokens without a "
        "route are native and frozen for the recompute; padding is spread. Several models, or "
        "virtual stages, which this call cannot tell apart, are refused. Nothing is done to the "
        "dispatcher: there are no repeating rows left for which SkyRL counts on the device."
    ),
    upstream="none known for 0.3.0; SkyRL's main branch has changed these functions",
    remove_when="SkyRL finds rows and routers by what they are",
    needed=_needed,
    apply=wrappers_at({_FORWARD: lambda _: _set_up_forward, _BACKWARD: lambda _: _set_up_backward}),
)
