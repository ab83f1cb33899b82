"""What exactness is tried with, how routers are run for it, and what a plain formula gives.

T tokens, E experts, K top-k. What a release has is asked of its fields and functions.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import megatron.core.transformer.moe.router as router_module
import pytest
import torch
from helpers.routers import RECORD
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor

from replay_patch.matrix import tiny

S, B, H, E, K = 5, 3, 16, 8, 4
T = S * B

TOPK = next(
    name
    for name in ("topk_routing_with_score_function", "topk_softmax_with_capacity")
    if hasattr(router_module, name)
)
ORIGINAL_TOPK = inspect.unwrap(getattr(router_module, TOPK))
NATIVE_REPLAY = "router_replay" in inspect.signature(ORIGINAL_TOPK).parameters
LOSSES_IN_ONE = hasattr(router_module.TopKRouter, "_apply_aux_loss")  # a list of kinds, too
GLOBAL_AUX_LOSS = hasattr(router_module.TopKRouter, "_apply_global_aux_loss")


def scores(function: str) -> bool:
    """Whether this release has the score function."""
    try:
        ORIGINAL_TOPK(torch.zeros(1, E), 1, score_function=function)
    except ValueError:
        return False
    return True


PRE, BIAS = {"moe_router_pre_softmax": True}, {"moe_router_enable_expert_bias": True}
SIGMOID = {"moe_router_score_function": "sigmoid"}
SQRTSOFTPLUS = {"moe_router_score_function": "sqrtsoftplus"}
ONE, GROUPS = {"moe_router_topk": 1}, {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
SCALED = {"moe_router_topk_scaling_factor": 2.5}

ROUTING: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax K=2": {"moe_router_topk": 2},
    "softmax K=E": {"moe_router_topk": E},
    "softmax scaled": SCALED,
    "pre-softmax": PRE,
    "pre-softmax K=1": PRE | ONE,
    "pre-softmax groups scaled": PRE | GROUPS | SCALED,
    "sigmoid": SIGMOID,
    "sigmoid K=1 scaled": SIGMOID | ONE | SCALED,
    "sigmoid bias": SIGMOID | BIAS,
    "sigmoid bias groups scaled": SIGMOID | BIAS | GROUPS | SCALED,
    "sigmoid bias K=1": SIGMOID | BIAS | ONE,
}
if scores("sqrtsoftplus"):
    ROUTING |= {
        "sqrtsoftplus": SQRTSOFTPLUS,
        "sqrtsoftplus bias groups": SQRTSOFTPLUS | BIAS | GROUPS,
        "sqrtsoftplus K=1": SQRTSOFTPLUS | ONE,
    }

PAD = {"moe_pad_expert_input_to_capacity": True}
Z_LOSS = {"moe_z_loss_coeff": 0.1}


def drop(policy: str, factor: float = 0.5) -> dict[str, Any]:
    return {"moe_expert_capacity_factor": factor, "moe_token_drop_policy": policy}


def loss(kind: Any, coefficient: Any = 0.1) -> dict[str, Any]:
    return {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": coefficient}


AROUND: dict[str, dict[str, Any]] = {
    "dropping by probs": drop("probs"),
    "dropping by position": drop("position"),
    "padding by probs": drop("probs", 0.75) | PAD,
    "padding by position": drop("position", 0.75) | PAD,
    "z-loss": Z_LOSS,
    "aux loss": loss("aux_loss"),
    "sequence aux loss": loss("seq_aux_loss"),
    "all at once": loss("aux_loss") | Z_LOSS | drop("probs"),
    "per-token loss": loss("seq_aux_loss") | Z_LOSS | {"calculate_per_token_loss": True},
}
if GLOBAL_AUX_LOSS:
    AROUND["global aux loss"] = loss("global_aux_loss")
if LOSSES_IN_ONE:
    AROUND["two aux losses"] = loss(["seq_aux_loss", "aux_loss"], [0.1, 0.2])

CASES = ROUTING | {
    f"{base}, {name}": ROUTING[base] | options
    for base in ("softmax", "sigmoid bias groups scaled")
    for name, options in AROUND.items()
}

BF16 = {"params_dtype": torch.bfloat16, "bf16": True}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp64 router": {"moe_router_dtype": "fp64"},
    "bf16": BF16,
    "bf16, fp32 router": BF16 | {"moe_router_dtype": "fp32"},
}

every_case = pytest.mark.parametrize("case", CASES)
every_routing = pytest.mark.parametrize("case", ROUTING)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


def make_router(case: str, precision: str = "fp32", seed: int = 0) -> Any:
    """A training router with spread logits and, where it has one, a bias that decides."""
    torch.manual_seed(seed)
    options = loss("none", 0.0) | {"num_moe_experts": E, "moe_router_topk": K}
    config = tiny.moe_config(
        enable_routing_replay=True, **options | CASES[case] | PRECISIONS[precision]
    )
    router = tiny.router(config)
    router.weight.data = torch.randn(E, H).to(config.params_dtype)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.randn(E))
    return router


def make_input(router: Any) -> tuple[Tensor, Tensor]:
    """Hidden states [S, B, H], and what the gradient of the probabilities is to be [T, E]."""
    return torch.randn(S, B, H).to(router.weight.dtype), torch.randn(T, E)


def some_ids(topk: int) -> Tensor:
    """[T, K] distinct ids per row, in any column order."""
    return torch.rand(T, E).argsort(dim=1)[:, :topk].contiguous()


def run(router: Any, hidden: Tensor, cotangent: Tensor, call: Any = None) -> dict[str, Tensor]:
    """One forward and backward: outputs, gradients, and the statistics that the router keeps.

    Args:
        call: what runs the router, if it is not called itself.
    """
    for name in router._non_persistent_buffers_set:
        getattr(router, name).zero_()
    router.zero_grad(set_to_none=True)
    hidden = hidden.clone().requires_grad_()
    probs, routing_map = (call or router)(hidden)
    (probs * cotangent).sum().backward()
    kept = {name: getattr(router, name).clone() for name in router._non_persistent_buffers_set}
    return kept | {
        "probs": probs.detach(),
        "map": routing_map,
        "weight gradient": router.weight.grad,
        "input gradient": hidden.grad,
    }


def act(router: Any, action: RouterReplayAction | None, *args: Tensor) -> dict[str, Tensor]:
    """`run` under an action; natively again afterwards."""
    if action is not None:
        router.router_replay.set_router_replay_action(action)
    try:
        return run(router, *args)
    finally:
        router.router_replay.clear_router_replay_action()


def differing(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not the same to the last bit, dtype and shape included."""
    assert expected.keys() == actual.keys()
    return [name for name, value in expected.items() if not same_bits(value, actual[name])]


def same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.equal(a, b):
        return False
    return not a.is_floating_point() or torch.equal(a.signbit(), b.signbit())


@contextlib.contextmanager
def determinism(on: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def weights(logits: Tensor, ids: Tensor, config: Any, fp32_inside: bool) -> Tensor:
    """The weights [T, K] of `ids`, from the definition; the expert bias has no part in them.

    Args:
        fp32_inside: cast to the dtype of the logits once, at the end (0.18 on), and not after the
            score function already.
    """

    def cast(x: Tensor) -> Tensor:
        return x if fp32_inside else x.type_as(logits)

    function = config.moe_router_score_function
    if function == "softmax" and not config.moe_router_pre_softmax:
        out = cast(torch.softmax(logits.gather(1, ids), dim=-1, dtype=torch.float32))
    elif function == "softmax":
        out = cast(torch.softmax(logits, dim=-1, dtype=torch.float32)).gather(1, ids)
    else:
        dense = logits.float()
        dense = (
            dense.sigmoid() if function == "sigmoid" else torch.nn.functional.softplus(dense).sqrt()
        )
        out = cast(dense).gather(1, ids)
        if ids.shape[1] > 1:
            out = out / (out.sum(dim=-1, keepdim=True) + 1e-20)
    if config.moe_router_topk_scaling_factor:
        out = out * config.moe_router_topk_scaling_factor
    return out.type_as(logits)


def by_formula(
    router: Any, ids: Tensor, hidden: Tensor, cotangent: Tensor, fp32_inside: bool
) -> dict[str, Tensor]:
    """What `run` has to give for a router without losses and capacity."""
    router.zero_grad(set_to_none=True)
    hidden = hidden.clone().requires_grad_()
    logits = router.gating(hidden).view(-1, E)
    probs = torch.zeros_like(logits).scatter(
        1, ids, weights(logits, ids, router.config, fp32_inside)
    )
    (probs * cotangent).sum().backward()
    routing_map = torch.zeros(T, E, dtype=torch.bool).scatter(1, ids, True)
    kept = (
        {"local_tokens_per_expert": routing_map.sum(0).float()} if router.enable_expert_bias else {}
    )
    return kept | {
        "probs": probs.detach(),
        "map": routing_map,
        "weight gradient": router.weight.grad,
        "input gradient": hidden.grad,
    }


@functools.cache
def rules() -> list[bool]:
    """The dtype rules that explain this release's native routing bitwise in every case."""
    explaining = [False, True]
    for case in ROUTING:
        router = make_router(case, "bf16")
        given_ = make_input(router)
        native = act(router, RECORD, *given_)
        ids = router.router_replay.get_recorded_indices()
        explaining = [
            rule
            for rule in explaining
            if not differing(by_formula(router, ids, *given_, rule), native)
        ]
    return explaining


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
