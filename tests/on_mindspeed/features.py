"""Each feature that the stand-in has and no other script switches on. Prints answers as JSON."""

import dataclasses
from typing import Any

from common import SIZES, config_class, helper, import_megatron, on_stage, report


def main() -> dict[str, Any]:
    from replay_patch.matrix import ascend_bed, cpu, tiny

    cpu.install()
    ascend_bed.adapt()
    import_megatron()
    tiny.init()
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    def where() -> list[str]:
        """The modules whose code is called."""
        topk = getattr(moe_utils, "topk_softmax_with_capacity", None)
        functions = (schedules.get_forward_backward_func(), random.checkpoint, topk)
        found = (getattr(f, "__globals__", {}).get("__name__", "") for f in functions)
        return [name.removeprefix("mindspeed.core.") for name in found]

    ascend_bed.repatch(schedules_method="dualpipev")
    out: dict[str, Any] = {"dualpipev": stages(), "dualpipev, vp_stage": stages(vp_stage=0)}
    ascend_bed.repatch(schedules_method=None, pipeline_model_parallel_layout=layout())
    out |= {"layout": stages(), "layout of rank 1": stages(pp_rank=1)}
    ascend_bed.repatch(
        pipeline_model_parallel_layout=None, recompute_in_advance=True, fix_router=True
    )
    out["ripipe, fix-router"] = where()
    ascend_bed.repatch(recompute_in_advance=None, fix_router=None, moe_fb_overlap=True)
    out["fb-overlap"] = where()[:2]
    return out


def layout() -> Any:
    """One layer on the first of two stages, three on the second."""
    fields = {field.name for field in dataclasses.fields(config_class("TransformerConfig"))}
    if "pipeline_model_parallel_layout" in fields:
        return "Et|t*3L"
    return [[["embedding", "decoder"]], [["decoder"] * 3 + ["loss"]]]  # 0.12


def stages(**given: Any) -> list[Any]:
    """(layers, offset) on each of two stages."""
    config = config_class("TransformerConfig")(
        **SIZES, pipeline_model_parallel_size=2, pipeline_dtype="float32"
    )
    names = ("get_num_layers_to_build", "get_transformer_layer_offset")
    return [on_stage(r, 2, lambda: [helper(n)(config, **given) for n in names]) for r in range(2)]


if __name__ == "__main__":
    report(main)
