"""Without this patch the expert bias of 0.16 ... 0.19 fails with a padding mask, or masks experts
in the place of tokens."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from replay_patch.patching import Patch, Transaction, probe
from replay_patch.patching.wrappers import module_of
from replay_patch.refusals import installed_megatron

_MODULE = "megatron.core.transformer.moe.router"
_TARGET = f"{_MODULE}:TopKRouter._apply_expert_bias"


def _needed() -> tuple[bool, str]:
    if probe.find(_TARGET) is None:
        return False, "this release's expert bias takes no padding_mask"
    eager = probe.unwrapped(_TARGET)  # jit_fuser is torch.compile: no compiler runs for a probe
    try:
        # Not by the signature: MindSpeed's torch.compile makes it (*args, **kwargs).
        wrong = _wrong(eager, (2,))
    except TypeError:
        return False, "this release's expert bias takes no padding_mask"
    if not wrong:
        return False, "a padding_mask [tokens] is applied to tokens"
    if still := _wrong(eager, (2, 1)):
        raise LookupError(
            f"_apply_expert_bias of {installed_megatron()} is not the function that we know: with "
            f"a padding_mask [tokens] {wrong}, with [tokens, 1] {still}"
        )
    return True, f"with a padding_mask [tokens], {wrong}"


def takes_masks_of_tokens() -> bool:
    """Whether a padding_mask [tokens] is counted rightly now: by Megatron, or by this patch."""
    return module_of(probe.find(_TARGET)) == __name__ or not _needed()[0]


def _wrong(function: Any, shape: tuple[int, ...]) -> str:
    """What is wrong with the counts of two tokens and three experts; "" if nothing is."""
    import torch

    chosen = torch.tensor([[True, True, False], [False, True, True]])
    mask = torch.tensor([False, True]).view(shape)
    counts = torch.zeros(3)
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=counts)
    with torch.enable_grad():
        try:
            function(router, chosen, padding_mask=mask)
        except RuntimeError as error:
            return f"it raises {error}"
    counted = router.local_tokens_per_expert.tolist()
    return "" if counted == [1, 1, 0] else f"it counts {counted} and not [1, 1, 0]"


def _apply(transaction: Transaction) -> None:
    transaction.wrap(
        probe.find(_MODULE + ":TopKRouter"), "_apply_expert_bias", _apply_expert_bias_by_row
    )


def _apply_expert_bias_by_row(original: Callable[..., None]) -> Callable[..., None]:
    def _apply_expert_bias(
        self: Any, routing_map: Any, padding_mask: Any = None, **kwargs: Any
    ) -> None:
        if padding_mask is not None:
            padding_mask = padding_mask.reshape(-1, 1)
        original(self, routing_map, padding_mask=padding_mask, **kwargs)

    return _apply_expert_bias


PATCH = Patch(
    name="expert_bias_mask",
    library="megatron",
    targets=(_TARGET,),
    requires=_MODULE,
    checks=("padding-bias", "padding-counts", "padding-tp-sp", "padding-pp"),
    why=(
        "A mask [tokens] meets a map [tokens, experts]: an error, or, with as many tokens as "
        "experts, no error and a mask over experts. With one token it is right by chance."
    ),
    how=(
        "Where a call with two tokens and three experts shows it, the method is wrapped and gets "
        "the mask as [tokens, 1]; so it may be given [tokens] or [tokens, 1]. The wrapper is "
        "around what `jit_fuser` made. How often it counts is the release's own: once under "
        "Megatron's checkpoints, in the recompute."
    ),
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/6114",
    remove_when="0.19 is no longer supported",
    needed=_needed,
    apply=_apply,
)
