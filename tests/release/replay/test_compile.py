"""Replay under the real `torch.compile`, which Megatron's `jit_fuser` is: same results, few graphs.

One fresh process runs everything with dynamo and a backend that runs the graphs as they are; each
test looks at one result. One more runs the router that Megatron compiles itself, with inductor.
"""

import functools
from typing import Any

import megatron.core.transformer.moe.router as router_module
import pytest
from helpers import interpreters

pytestmark = pytest.mark.mechanism


@functools.cache
def results(program: str) -> dict[str, Any]:
    return interpreters.run_module(f"programs.replay.{program}", REPLAY_PATCH="1")


def result(case: str) -> dict[str, Any]:
    return results("compiled_inference" if case.startswith("inference") else "compiled_training")[
        case
    ]


HAS_INFERENCE = hasattr(router_module, "InferenceTopKRouter")
HAS_QUANTILES = hasattr(router_module.TopKRouter, "quantile_balancing")
TRAINED = ["compile_forward", "compile_routing", "compile_topk", "groups"]
INFERRED = ["inference softmax", "inference sigmoid bias"] * HAS_INFERENCE
ACTIONS = ["idle", "record", "replay_forward"]
RUNS = [(case, action) for case in TRAINED + INFERRED for action in ACTIONS]
RUNS += [(case, "replay_backward") for case in TRAINED]


@pytest.mark.parametrize("case, action", RUNS)
def test_compiled_and_eager_agree(case: str, action: str) -> None:
    """Outputs, recordings and gradients; bitwise but for inductor."""
    found = result(case)

    assert found["idle"]["graphs"] >= 1  # it was compiled
    assert found[action]["same"]


@pytest.mark.parametrize("case, action", RUNS)
def test_changing_targets_compile_nothing_anew(case: str, action: str) -> None:
    found = result(case)[action]

    assert found["new frames"] == 0


@pytest.mark.parametrize(
    "case, words",
    [(case, "no target") for case in TRAINED + INFERRED]
    + [("inference quantile balancing", "precomputed")] * HAS_QUANTILES,
)
def test_a_refusal_is_the_same_error_when_compiled(case: str, words: str) -> None:
    kind, text = result(case)["error"]

    assert kind == "RouteError"
    assert words in text
