"""Without this patch the auxiliary loss of a microbatch that is padding only is NaN on 0.16 ...
0.19, and after the step so are all weights."""

import sys
from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, Transaction, probe
from replay_patch.patching.rebinding import with_globals

_UTILS = "megatron.core.transformer.moe.moe_utils"
_ROUTER = "megatron.core.transformer.moe.router"
_NAME = "get_tokens_per_expert_and_token_count"


def _needed() -> tuple[bool, str]:
    count, loss = (
        probe.find(f"{_ROUTER}:{name}") for name in (_NAME, "switch_load_balancing_loss_func")
    )
    if count is None or "with_padding_mask" not in probe.parameters(f"{_ROUTER}:{_NAME}"):
        return False, "this release's auxiliary loss takes no padding mask"
    import torch

    all_padding = torch.zeros(2, 3, dtype=torch.bool)
    # There are no process groups yet, and Megatron's sum over ranks wants one.
    of_one_rank = {"reduce_from_tensor_model_parallel_region": lambda tokens, _: tokens}
    tokens, _, total = with_globals(count, of_one_rank)(
        routing_map=all_padding, reduce_group=None, topk=1, with_padding_mask=True
    )
    value = loss(
        probs=all_padding.float(),
        tokens_per_expert=tokens,
        total_num_tokens=total,
        topk=1,
        num_experts=3,
        moe_aux_loss_coeff=1.0,
    )
    return not bool(value == 0), f"the auxiliary loss of two rows of padding is {float(value)}"


def _apply(transaction: Transaction) -> None:
    transaction.wrap_everywhere(sys.modules[_ROUTER], _NAME, _count_tokens_or_one)


def _count_tokens_or_one(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def count(*args: Any, **kwargs: Any) -> Any:
        tokens, local, total = original(*args, **kwargs)
        if isinstance(total, torch.Tensor):
            total = torch.where(total == 0, torch.ones_like(total), total)
        return tokens, local, total

    return count


PATCH = Patch(
    name="padding_only_loss",
    library="megatron",
    targets=(f"{_UTILS}:{_NAME}", f"{_ROUTER}:{_NAME}"),
    requires=_ROUTER,
    relies_on=(f"{_UTILS}:switch_load_balancing_loss_func",),
    checks=("padding-only",),
    why=(
        "With `padding_mask` the auxiliary losses are divided by the square of the number of real "
        "tokens. If there is none, loss and gradients are NaN, and so are all weights after the "
        "step. Schedules that fill up with empty microbatches meet it."
    ),
    how=(
        "A wrapper, set wherever the function is bound, that gives a count of 1 in the place of 0. "
        "All other counts are unchanged; the sums that are divided by it are zero."
    ),
    upstream="none known: 0.19.2 still divides by zero",
    remove_when="the release itself gives zero",
    needed=_needed,
    apply=_apply,
)
