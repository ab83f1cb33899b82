"""SkyRL's batches and samples: where the routes are in them, and whose they are."""

import importlib
from collections.abc import Sequence
from typing import Any

from replay_patch.errors import RouteError
from replay_patch.patching import probe

FIELD = "rollout_expert_indices"
"""The routes, in SkyRL's samples and batches."""

REPLAY_MODULE = "skyrl.backends.skyrl_train.utils.replay_utils"
REPLAY_FORWARD = "setup_per_microbatch_replay_forward"
REPLAY_BACKWARD = "setup_per_microbatch_replay_backward"
_PARAMETERS = (FIELD, "attention_mask", "model_config", "remove_microbatch_padding")


def check_form() -> None:
    """Raise LookupError unless SkyRL hands a microbatch over as the release that we know."""
    parameters = probe.parameters(f"{REPLAY_MODULE}:{REPLAY_FORWARD}")
    if parameters != frozenset(_PARAMETERS):
        raise LookupError(
            f"{REPLAY_MODULE}.{REPLAY_FORWARD} takes "
            f"{', '.join(sorted(parameters)) or 'nothing'}: expected {', '.join(_PARAMETERS)}, as "
            "in SkyRL 0.3.0. Its replay runs as it is, unchecked"
        )


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
    that it has added, observations, samples it has made up. Expert 0, K times over in every layer,
    is what no router chooses. (With top-1 one can: such a token counts as one without a route.)

    Args:
        ids: int [B, S, L, K]; None: nothing was captured.
        attention_mask: [B, S], of the real tokens.
        packed: whether SkyRL packs the sequences of a microbatch into one row.
        layers: the MoE layers that are asked for.
        sub_seq_lengths: of the sequences in each row, if a row holds several.

    RouteError: the routes do not fit the tokens, the layers or the experts.
    """
    import torch

    from replay_patch.megatron.layer_placement import moe_layers
    from replay_patch.routes import Routes

    lengths, tokens, layout = _tokens(attention_mask, config, packed, sub_seq_lengths)
    moe = moe_layers(config)
    wanted = tuple(layers) or moe[:1]  # a stage of dense layers: any will do
    if ids is None:
        rows = torch.zeros(len(tokens), len(wanted), config.moe_router_topk, dtype=torch.uint8)
        captured = torch.zeros(len(tokens), dtype=torch.bool)
    else:
        if ids.dim() != 4 or ids.shape[:2] != attention_mask.shape:
            raise RouteError(
                f"SkyRL's rollout_expert_indices have shape {tuple(ids.shape)}: expected "
                f"[{', '.join(map(str, attention_mask.shape))}, layers, topk], as attention_mask"
            )
        axis = _axis(ids.shape[2], config, moe)
        model = ids[:, :, [axis.index(number) for number in moe]]
        known = (model != 0).flatten(2).any(2) & (model >= 0).flatten(2).all(2)
        captured = known.cpu().flatten()[tokens]
        # This stage's layers only, before they leave the device.
        own = ids[:, :, [axis.index(number) for number in wanted]]
        rows = own.cpu().flatten(0, 1)[tokens]
    pieces = zip(torch.split(rows, lengths), torch.split(captured, lengths), strict=True)
    routes = []
    for sequence, (piece, mask) in enumerate(pieces):
        try:
            routes.append(Routes(piece, config.num_moe_experts, captured=mask, layers=wanted))
        except RouteError as error:
            raise RouteError(
                f"SkyRL's rollout_expert_indices, sequence {sequence}: {error}"
            ) from None
    return routes, layout


def _axis(size: int, config: Any, moe: tuple[int, ...]) -> Sequence[int]:
    """The layer numbers along a layer axis of this size."""
    if size == config.num_layers:
        return range(1, size + 1)
    if size == len(moe):
        return moe
    raise RouteError(
        f"SkyRL's rollout_expert_indices hold {size} layers: expected all {config.num_layers} of "
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
    ranks: dict[str, Any] = {
        "tp_size": tp_size,
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "sequence_parallel": bool(config.sequence_parallel),
    }
    if packed:
        ranks["cp_size"] = parallel_state.get_context_parallel_world_size()
        ranks["cp_rank"] = parallel_state.get_context_parallel_rank()
        align = skyrl.get_packed_seq_align_size(tp_size, ranks["cp_size"], fp8_enabled=fp8)
    else:
        align = skyrl.get_unpacked_seq_align_size(tp_size, fp8_enabled=fp8)

    mask = attention_mask.to("cpu", torch.bool)
    tokens = []  # of each sequence
    for row, real in enumerate(mask):
        begin = row * mask.shape[1]
        if sub_seq_lengths is None:
            tokens.append(real.nonzero()[:, 0] + begin)
            continue
        for length in sub_seq_lengths[row]:
            tokens.append(torch.arange(begin, begin + length))
            begin += -(-length // align) * align
    lengths = [len(each) for each in tokens]
    if packed:
        layout = TokenLayout.packed(lengths, align=align, **ranks)
    else:
        layout = TokenLayout.padded(lengths, max(lengths), align=align, **ranks)
    return lengths, torch.cat(tokens), layout


def refuse_missing(routes: Any, loss_masks: Any) -> None:
    """Raise RouteError if a sample that is trained on has no routes; None: replay is off. Samples
    that failed in the rollout, which SkyRL masks out as a whole, may lack them."""
    if routes is None:
        return
    missing = [
        number
        for number, (of_sample, mask) in enumerate(zip(routes, loss_masks, strict=True))
        if (of_sample is None or not len(of_sample)) and any(mask)
    ]
    if missing:
        raise RouteError(
            f"SkyRL: sample {missing[0]} has no {FIELD} ({len(missing)} of {len(routes)} samples "
            f"have none: {missing[:8]}{' ...' if len(missing) > 8 else ''}), although the engine "
            "was asked for them (generator.inference_engine.enable_return_routed_experts); "
            "expected the experts of each token. Look at the engine's answer, and at what a "
            "custom generator or agent loop copies of it"
        )
