"""The stand-in's features take Megatron's places, and what they put there behaves as said."""

from helpers.mindspeed_processes import ask

ANSWERS = {
    "dualpipev": [[1, 3], [1, 2]],  # of the second chunk, whichever it is for
    "dualpipev, vp_stage": ["TypeError", "TypeError"],
    "layout": [[1, 0], [3, 1]],
    "layout of rank 1": [[1, 0], [3, 1]],
    "ripipe, fix-router": [
        "pipeline_parallel.ripipe_schedules",
        "tensor_parallel.random",
        "transformer.moe.moe_feature.fix_router",
    ],
    "fb-overlap": ["pipeline_parallel.fb_overlap.adaptor", "megatron.core.tensor_parallel.random"],
}


def test_features_that_a_repatch_switches_on() -> None:
    assert ask("stand-in", "features.py") == ANSWERS
