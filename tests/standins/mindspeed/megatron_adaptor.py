"""Importing this rewrites Megatron. `repatch` does it again, with other arguments."""

import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from mindspeed.args_utils import get_full_args, get_mindspeed_args
from mindspeed.patch_utils import MindSpeedPatchesManager

_CONFIG = "megatron.core.transformer.transformer_config"
_BASIC = "mindspeed.core.megatron_basic.arguments_basic"
_UNALIGNED = "mindspeed.core.pipeline_parallel.unaligned.unaligned_pipeline"
_DUALPIPEV = "mindspeed.core.pipeline_parallel.dualpipev.dualpipev_chunks"
_LAYOUT = "mindspeed.core.pipeline_parallel.pipeline_model_parallel_layout.adaptor"
_MOE = "mindspeed.core.transformer.moe.moe_feature"
_FB_OVERLAP = "mindspeed.core.pipeline_parallel.fb_overlap.adaptor"
_NOOP = "mindspeed.core.pipeline_parallel.noop_layers.adaptor"
_RIPIPE = "mindspeed.core.pipeline_parallel.ripipe_schedules"

_OFFSET = "megatron.core.transformer.transformer_layer.get_transformer_layer_offset"
_LAYERS = "megatron.core.transformer.transformer_block.get_num_layers_to_build"
_SCHEDULE = "megatron.core.pipeline_parallel.schedules.get_forward_backward_func"

_FEATURES: tuple[tuple[str, dict[str, str]], ...] = (
    (
        "pipeline_num_transformer_layers",
        {
            _LAYERS: f"{_UNALIGNED}.get_num_layers_to_build_unaligned",
            # Not what gives layers their number, which is left alone.
            "megatron.core.transformer.transformer_layer.TransformerLayer._get_layer_offset": (
                f"{_UNALIGNED}.get_layer_offset_unaligned"
            ),
        },
    ),
    (
        "schedules_method",
        {
            _LAYERS: f"{_DUALPIPEV}.get_num_layers_to_build",
            _OFFSET: f"{_DUALPIPEV}.get_transformer_layer_offset",
        },
    ),
    (
        "pipeline_model_parallel_layout",
        {
            _LAYERS: f"{_LAYOUT}.get_num_layers_to_build_wrapper",
            _OFFSET: f"{_LAYOUT}.get_transformer_layer_offset_wrapper",
        },
    ),
    (
        "noop_layers",
        {
            "megatron.core.transformer.transformer_block.TransformerBlock._build_layers": (
                f"{_NOOP}.mindspeed_build_layers"
            )
        },
    ),
    (
        "moe_tp_extend_ep",
        {
            "megatron.core.transformer.moe.router.TopKRouter.routing": (
                f"{_MOE}.common.routing_tp_extend_ep"
            )
        },
    ),
    (
        "fix_router",
        {
            "megatron.core.transformer.moe.moe_utils.topk_softmax_with_capacity": (
                f"{_MOE}.fix_router.topk_softmax_with_capacity"
            )
        },
    ),
    (
        "recompute_in_advance",
        {
            "megatron.core.tensor_parallel.random.checkpoint": (
                "mindspeed.core.tensor_parallel.random.checkpoint_wrapper"
            ),
            _SCHEDULE: f"{_RIPIPE}.get_forward_backward_func_ripipe_patch",
        },
    ),
    ("moe_fb_overlap", {_SCHEDULE: f"{_FB_OVERLAP}.get_forward_backward_func_vpp_overlap_wrapper"}),
)
"""(the argument that switches it on, what it puts where)."""


def patch_features() -> None:
    """What happens before Megatron is imported, and what after it."""
    torch.compile = lambda model=None, **_: model or (lambda function: function)
    MindSpeedPatchesManager.apply_patches()  # at a repatch: every place as it was found
    words = os.environ.get("MINDSPEED_STANDIN", "").split()
    for config in ("TransformerConfig", *(() if "no_mla" in words else ("MLATransformerConfig",))):
        _register(f"{_CONFIG}.{config}.__init__", f"{_BASIC}.transformer_config_init_wrapper")
    _register(
        f"{_CONFIG}.TransformerConfig.__post_init__",
        f"{_BASIC}.transformer_config_post_init_wrapper",
    )
    if "init_subclass" in words:
        _register(
            f"{_CONFIG}.TransformerConfig.__init_subclass__",
            f"{_BASIC}.transformer_config_init_subclass",
        )
    for argument, places in _FEATURES:
        if getattr(get_full_args(), argument, None):
            for place, new in places.items():
                _register(place, new)
    MindSpeedPatchesManager.apply_patches()


def repatch(args: Mapping[str, Any]) -> None:
    """Take all off, and put on what these arguments ask for."""
    MindSpeedPatchesManager.remove_patches()
    vars(get_full_args()).update(args)
    patch_features()


def _register(place: str, new: str) -> None:
    module, _, name = new.rpartition(".")
    MindSpeedPatchesManager.register_patch(place, getattr(importlib.import_module(module), name))


get_mindspeed_args()
patch_features()
