"""What changes with a Megatron release: one file, one `Patch`.

The order is the order of application. `docs/patches.md` is generated from these.
"""

from replay_patch.patches.ascend import rebuilt_config, repatch
from replay_patch.patches.megatron import (
    aux_loss_methods,
    block_recompute_mask,
    config_fields,
    expert_bias_mask,
    fused_router,
    layer_helpers,
    mtp_depth,
    mtp_recompute_mask,
    native_router_replay,
    padding_mask,
    padding_mask_shape,
    padding_only_loss,
    router_guard,
    router_objects,
    router_replay_module,
    router_topk,
)
from replay_patch.patches.skyrl import (
    skyrl_environment,
    skyrl_expert_bias,
    skyrl_lost_routes,
    skyrl_missing_routes,
    skyrl_replay_schedule,
    skyrl_replay_setup,
    skyrl_sampling,
)
from replay_patch.patches.verl import (
    verl_actor_pass,
    verl_engine_pass,
    verl_environment,
    verl_max_tokens,
    verl_max_tokens_sglang,
    verl_packing,
    verl_replay_config,
    verl_resumed_routes,
    verl_rollout_routes,
    verl_router_lists,
    verl_router_replay,
    verl_uncaptured_rows,
    verl_wide_ids,
)

PATCHES = (
    config_fields.PATCH,
    rebuilt_config.PATCH,
    aux_loss_methods.PATCH,
    layer_helpers.PATCH,
    router_replay_module.PATCH,
    native_router_replay.PATCH,
    router_topk.PATCH,
    fused_router.PATCH,
    router_objects.PATCH,
    mtp_depth.PATCH,
    router_guard.PATCH,
    padding_only_loss.PATCH,
    expert_bias_mask.PATCH,
    padding_mask_shape.PATCH,
    block_recompute_mask.PATCH,
    mtp_recompute_mask.PATCH,
    padding_mask.PATCH,  # after router_objects, around whose forward its own comes
    repatch.PATCH,
    verl_router_replay.PATCH,
    verl_router_lists.PATCH,
    verl_rollout_routes.PATCH,
    verl_resumed_routes.PATCH,
    verl_uncaptured_rows.PATCH,
    verl_max_tokens.PATCH,
    verl_max_tokens_sglang.PATCH,
    verl_environment.PATCH,
    skyrl_replay_setup.PATCH,
    skyrl_replay_schedule.PATCH,
    skyrl_expert_bias.PATCH,
    skyrl_sampling.PATCH,
    skyrl_missing_routes.PATCH,
    skyrl_lost_routes.PATCH,
    skyrl_environment.PATCH,
    verl_wide_ids.PATCH,
    verl_packing.PATCH,
    verl_engine_pass.PATCH,
    verl_actor_pass.PATCH,
    verl_replay_config.PATCH,
)

REPLAY_PATCHES = tuple(patch.name for patch in PATCHES if patch.vital)
"""Using replay is refused unless each of these is in place, or not needed."""

MEGATRON_MODULES = tuple(dict.fromkeys(p.modules[-1] for p in PATCHES if p.library == "megatron"))
"""Importing these lets every patch of Megatron decide: the last module of each exists in every
release."""
