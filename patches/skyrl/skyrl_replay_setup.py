"""SkyRL's routes of a microbatch come to the routers and rows that its tokens go through."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from replay_patch.errors import RouteError
from replay_patch.patching import probe
from replay_patch.patching.patch import Patch
from replay_patch.patching.transaction import Transaction
from replay_patch.refusals import installed_megatron

_MODULE = "skyrl.backends.skyrl_train.utils.replay_utils"
_NAMES = (
    "setup_per_microbatch_replay_forward",
    "setup_per_microbatch_replay_backward",
)
_PARAMETERS = (
    "rollout_expert_indices",
    "attention_mask",
    "model_config",
    "remove_microbatch_padding",
)


def check_form() -> None:
    """Raise LookupError unless SkyRL hands a microbatch over as the release that we know."""
    found = probe.parameters(f"{_MODULE}:{_NAMES[0]}")
    if found != frozenset(_PARAMETERS):
        raise LookupError(
            f"{_MODULE}.{_NAMES[0]} takes {', '.join(sorted(found)) or 'nothing'}: expected "
            f"{', '.join(_PARAMETERS)}, as in SkyRL 0.3.0. Its replay runs as it is, unchecked"
        )


def _needed() -> tuple[bool, str]:
    import torch

    split = probe.find(f"{_MODULE}:_split_replay_indices")
    if split is not None:
        [rows] = split(torch.arange(4).view(2, 2, 1, 1))  # two sequences of two positions
        if rows.flatten().tolist() == [0, 2, 1, 3] and not _by_position():
            return False, "routes are in the order of the router rows, and routers by layer"
    check_form()
    return True, "routes are flattened sequence after sequence, and routers go by places in a list"


def _by_position() -> bool:
    codes = [getattr(found, "__code__", None) for found in vars(sys.modules[_MODULE]).values()]
    return any(code and "global_router_replay_instances" in code.co_names for code in codes)


def _apply(transaction: Transaction) -> None:
    module = sys.modules[_MODULE]
    transaction.wrap_everywhere(module, _NAMES[0], lambda _: _forward)
    transaction.wrap_everywhere(module, _NAMES[1], lambda _: _backward)


# --- what SkyRL calls ---------------------------------------------------------------------------


def _forward(
    rollout_expert_indices: Any,
    attention_mask: Any,
    model_config: Any,
    remove_microbatch_padding: bool = False,
) -> None:
    """Let the routers of this stage replay one microbatch, until the next call.

    SkyRL's own schedules do not come here (skyrl_replay_schedule): it is for code that drives
    models by itself.
    """
    from replay_patch.device_copies import to_device
    from replay_patch.megatron.layer_placement import moe_layers
    from replay_patch.megatron.local_layers import local_layers
    from replay_patch.megatron.parallel_ranks import ParallelRanks
    from replay_patch.replay import target_ids
    from replay_patch.replay.router_replay import MODULE, instances
    from replay_patch.routes import RouteBatch
    from replay_patch.sessions.microbatch import router_rows

    action = importlib.import_module(MODULE).RouterReplayAction.REPLAY_FORWARD
    if (getattr(model_config, "virtual_pipeline_model_parallel_size", None) or 1) > 1:
        raise RouteError(
            f"{installed_megatron()}, SkyRL's {_NAMES[0]}: the model has virtual pipeline stages, "
            "and the call does not say which of them it is for; expected a schedule of "
            "MegatronModelWrapper's, or a replay_patch.replaying() block, which know"
        )
    layers = local_layers(model_config)
    entries = _entries(layers)
    routes, layout = microbatch(
        rollout_expert_indices, attention_mask, model_config, remove_microbatch_padding, layers
    )
    found = RouteBatch(routes).to_rows(
        layout,
        layers,
        moe_layers(model_config),
        model_config.num_layers,
        rows=router_rows(layout, model_config),
        ep_size=model_config.expert_model_parallel_size,
        first_padding=ParallelRanks.of(model_config).data_rank * model_config.moe_router_topk,
    )
    device = rollout_expert_indices.device
    given = to_device(found.expert_ids, device)
    replayed = to_device(~found.holes, device) if bool(found.holes.any()) else None
    for entry, ids in zip(entries, given, strict=True):
        entry.set_target_indices(
            ids if replayed is None else target_ids.with_native_rows(ids, replayed, entry)
        )
        if getattr(model_config, "recompute_granularity", None) is None:
            entry.replay_backward_list.clear()  # nothing will ask for it
    for entry in instances():
        if any(entry is told for told in entries):
            entry.set_router_replay_action(action)
        else:  # an MTP block: no engine captures its routes
            entry.clear_router_replay_action()


def _backward() -> None:
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
    wrong = {number: len(found) for number, found in by_layer.items() if len(found) != 1}
    if wrong or len(by_layer) > len(layers):
        raise RouteError(
            f"{installed_megatron()}, SkyRL's {_NAMES[0]}: the MoE layers of this stage are "
            f"{tuple(layers)}, and routers with replay on are in {sorted(by_layer, key=str)} "
            f"(not one for a layer: {wrong}); expected one model with replay on in a process. "
            "Switch replay off for the others, or run each by MegatronModelWrapper, or with "
            "replay_patch.replaying()"
        )
    return [by_layer[number][0] for number in layers]


# --- what SkyRL's batches mean ------------------------------------------------------------------


def microbatch(
    ids: Any,
    attention_mask: Any,
    config: Any,
    packed: bool,
    layers: Sequence[int],
    sub_seq_lengths: Sequence[Sequence[int]] | None = None,
) -> tuple[list[Any], Any]:
    """(one Routes per sequence, the TokenLayout) of a microbatch.

    SkyRL fills with zeros what has no route: padding, the tokens after a captured prefix, an EOS
    that it has added, observations, samples it has made up. In the batch that is expert 0, K times
    over in every layer, which no router chooses. (With top-1 a router can: then a token that has
    expert 0 in all layers of the model counts as one without a route.)

    Args:
        ids: int [B, S, L, K]; None: nothing was captured.
        attention_mask: [B, S], of the real tokens.
        config: of the model.
        packed: whether SkyRL packs the sequences of a microbatch into one row.
        layers: the MoE layers that are asked for.
        sub_seq_lengths: for each row the sequences in it, if several are in one.

    Raises:
        RouteError: routes that do not fit the tokens, the layers or the experts.
    """
    import torch

    from replay_patch.megatron.layer_placement import moe_layers
    from replay_patch.routes import Routes

    lengths, places, layout = _tokens(attention_mask, config, packed, sub_seq_lengths)
    moe = moe_layers(config)
    wanted = tuple(layers) or moe[:1]  # a stage of dense layers: any will do
    if ids is None:
        rows = torch.zeros(len(places), len(wanted), config.moe_router_topk, dtype=torch.uint8)
        captured = torch.zeros(len(places), dtype=torch.bool)
    else:
        if ids.dim() != 4 or ids.shape[:2] != attention_mask.shape:
            raise RouteError(
                f"SkyRL's rollout_expert_indices have shape {tuple(ids.shape)}: expected "
                f"[{', '.join(map(str, attention_mask.shape))}, layers, topk], as attention_mask"
            )
        axis = _axis(ids.shape[2], config, moe)
        model = ids[:, :, [axis.index(number) for number in moe]]
        known = (model != 0).flatten(2).any(2) & (model >= 0).flatten(2).all(2)
        captured = known.cpu().flatten()[places]
        # This stage's layers only, before they leave the device.
        own = ids[:, :, [axis.index(number) for number in wanted]]
        rows = own.cpu().flatten(0, 1)[places]
    pieces = zip(torch.split(rows, lengths), torch.split(captured, lengths), strict=True)
    routes = []
    for place, (piece, mask) in enumerate(pieces):
        try:
            routes.append(Routes(piece, config.num_moe_experts, captured=mask, layers=wanted))
        except RouteError as error:
            raise RouteError(f"SkyRL's rollout_expert_indices, sequence {place}: {error}") from None
    return routes, layout


def _axis(held: int, config: Any, moe: tuple[int, ...]) -> Sequence[int]:
    """The layer number of each place on the layer axis."""
    if held == config.num_layers:
        return range(1, held + 1)
    if held == len(moe):
        return moe
    raise RouteError(
        f"SkyRL's rollout_expert_indices hold {held} layers: expected all {config.num_layers} of "
        f"the model, or its {len(moe)} MoE layers"
    )


def _tokens(
    attention_mask: Any, config: Any, packed: bool, sub_seq_lengths: Any
) -> tuple[list[int], Any, Any]:
    """(length of each sequence, place of each token in the flattened [B, S], layout)."""
    import torch
    from megatron.core import parallel_state

    from replay_patch.routes import TokenLayout

    skyrl = importlib.import_module("skyrl.backends.skyrl_train.distributed.megatron.packing_utils")
    fp8 = skyrl.is_fp8_enabled(getattr(config, "fp8", None))
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    where: dict[str, Any] = {
        "tp_size": tp_size,
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "sequence_parallel": bool(config.sequence_parallel),
    }
    if packed:
        where["cp_size"] = parallel_state.get_context_parallel_world_size()
        where["cp_rank"] = parallel_state.get_context_parallel_rank()
        align = skyrl.get_packed_seq_align_size(tp_size, where["cp_size"], fp8_enabled=fp8)
    else:
        align = skyrl.get_unpacked_seq_align_size(tp_size, fp8_enabled=fp8)

    mask = attention_mask.to("cpu", torch.bool)
    found = []
    for row, real in enumerate(mask):
        begin = row * mask.shape[1]
        if sub_seq_lengths is None:
            found.append(real.nonzero()[:, 0] + begin)
            continue
        for length in sub_seq_lengths[row]:
            found.append(torch.arange(begin, begin + length))
            begin += -(-length // align) * align
    lengths = [len(places) for places in found]
    if packed:
        layout = TokenLayout.packed(lengths, align=align, **where)
    else:
        layout = TokenLayout.padded(lengths, max(lengths), align=align, **where)
    return lengths, torch.cat(found), layout


PATCH = Patch(
    name="skyrl_replay_setup",
    library="skyrl",
    targets=tuple(f"{_MODULE}:{name}" for name in _NAMES),
    modules=(_MODULE,),
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
    apply=_apply,
)
