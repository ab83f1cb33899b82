"""Routers and models with padding, and what each loss has to be, from its definition.

B sequences of S positions, T = S * B rows of which V are real, E experts, K top-k.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import megatron.core
import torch
from helpers.exactness import loss
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from packaging.version import Version
from torch import Tensor

from replay_patch.matrix import tiny

S, B, H, E, K = 5, 3, 16, 8, 2
T = S * B
LAYER = 3
RELEASE = Version(megatron.core.__version__).release[:2]
NATIVE = "padding_mask" in inspect.signature(inspect.unwrap(TopKRouter.forward)).parameters
GLOBAL_AUX = hasattr(TopKRouter, "_apply_global_aux_loss")
COUNTS_CHOICES_IN_USE = RELEASE == (0, 12)
"""Later releases count a top-k of the scores of their own for auxiliary losses."""

SIGMOID_BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
KINDS = ["aux_loss", "seq_aux_loss", *(["global_aux_loss"] if GLOBAL_AUX else [])]
Z, AUX = 0.3, 0.2


def make_router(kind: str = "none", **options: Any) -> Any:
    """A training router with spread logits and, where it has one, a bias that decides."""
    torch.manual_seed(0)
    given = {"num_moe_experts": E, "moe_router_topk": K, "moe_z_loss_coeff": Z} | options
    router = tiny.router(tiny.moe_config(**loss(kind, AUX if kind != "none" else 0.0) | given))
    router.set_layer_number(1)  # what logs losses has a place for each layer of the config
    router.weight.data = torch.randn(router.weight.shape)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.randn(router.expert_bias.shape))
    return router


def hidden_states(rows: int = S, batch: int = B, seed: int = 1) -> Tensor:
    return torch.randn(rows, batch, H, generator=torch.Generator().manual_seed(seed))


def ragged_mask() -> Tensor:
    """bool [S, B]: padding on the right, on the left, and in between (packed sequences)."""
    mask = torch.zeros(S, B, dtype=torch.bool)
    mask[-2:, 0] = mask[:1, 1] = mask[2, 2] = True
    return mask


@contextlib.contextmanager
def attached_losses() -> Iterator[list[Tensor]]:
    """The losses that routers attach to their outputs, in order."""
    seen: list[Tensor] = []
    original = MoEAuxLossAutoScaler.forward

    def forward(ctx: Any, output: Tensor, aux_loss: Tensor) -> Tensor:
        seen.append(aux_loss.detach().clone())
        return original(ctx, output, aux_loss)

    MoEAuxLossAutoScaler.forward = staticmethod(forward)
    try:
        yield seen
    finally:
        MoEAuxLossAutoScaler.forward = staticmethod(original)


def run(router: Any, hidden: Tensor, **kwargs: Any) -> dict[str, Any]:
    """One forward and backward of the attached losses alone."""
    for name in router._non_persistent_buffers_set:
        getattr(router, name).zero_()
    router.zero_grad(set_to_none=True)
    hidden = hidden.clone().requires_grad_()
    with attached_losses() as losses:
        probs, routing_map = router(hidden, **kwargs)
    (probs * 0).sum().backward()
    counts = router.local_tokens_per_expert
    return {
        "probs": probs.detach(),
        "map": routing_map,
        "losses": losses,
        "weight gradient": router.weight.grad,
        "input gradient": hidden.grad,
        "counts": None if counts is None else counts.clone(),
    }


def by_formula(
    router: Any, hidden: Tensor, mask: Tensor, kind: str, chosen: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """(z-loss and auxiliary loss, gradient of the router's weight, of its input).

    Args:
        mask: bool [S, B].
        chosen: bool [T, E], the choices in use.
    """
    weight = router.weight.detach().clone().requires_grad_()
    hidden = hidden.clone().requires_grad_()
    logits = (hidden @ weight.t()).flatten(0, 1)
    real = ~mask.flatten()
    z = logits[real].logsumexp(-1).square().mean() * Z
    if router.config.moe_router_score_function == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    counted = chosen
    if not COUNTS_CHOICES_IN_USE:
        counted = torch.zeros(len(logits), E).bool().scatter(1, scores.topk(K).indices, True)
    parts = [torch.ones_like(real)]
    if kind == "seq_aux_loss":  # each sequence, all divided by the square of their mean length
        parts = list(torch.eye(mask.shape[1]).bool().repeat(mask.shape[0], 1).unbind(1))
    tokens = real.sum()
    size = tokens / len(parts)
    aux = torch.stack(
        [(counted[p & real].sum(0) * scores[p & real].sum(0)).sum() for p in parts]
    ).mean() * (AUX * E / (K * size**2))
    losses = [z, aux] if kind != "none" else [z]
    if router.config.calculate_per_token_loss:
        losses[0] = z * tokens
        if kind != "none":
            # 0.16 ... 0.18 take the tokens of one sequence there, with or without a mask.
            of_one = kind == "seq_aux_loss" and (0, 16) <= RELEASE <= (0, 18)
            losses[1] = aux * (size if of_one else tokens)
    sum(losses).backward()  # type: ignore[union-attr]
    return [one.detach() for one in losses], weight.grad, hidden.grad  # type: ignore[return-value]


# --- models ---------------------------------------------------------------------------------------

LENGTH, TOTAL = 6, 8
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = FULL | {"recompute_method": "block"}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
TAKES_MASK = "padding_mask" in inspect.signature(inspect.unwrap(GPTModel.forward)).parameters


def make_model(torch_attention: bool | None = None, **options: Any) -> Any:
    tiny.clear_aux_tracker()
    defaults = {
        "num_moe_experts": E,
        "moe_z_loss_coeff": Z,
        **loss("aux_loss", AUX),
        **SIGMOID_BIAS,
    }
    config = tiny.moe_config(**defaults | options)
    return tiny.gpt_model(config, torch_attention=torch_attention)


def batch(total: int, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, positions, padding mask), each [B, total]; padding is token 0, after `length`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, tiny.VOCAB_SIZE, (B, TOTAL), generator=generator)[:, :total]
    positions = torch.arange(total).expand(B, total)
    mask = positions >= length
    return tokens.masked_fill(mask, 0), positions, mask


def loss_of(model: Any, total: int, length: int = LENGTH, seed: int = 0, **more: Any) -> Tensor:
    """The mean over real tokens; `more` are arguments of the model."""
    tokens, positions, mask = batch(total, length, seed)
    losses = model(tokens, positions, None, labels=tokens, **more)
    return (losses * ~mask).sum() / (~mask).sum().clamp(min=1)


def masked_loss(model: Any, length: int = LENGTH, seed: int = 0) -> Tensor:
    return loss_of(model, TOTAL, length, seed, padding_mask=batch(TOTAL, length)[2])


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def take(model: Any) -> dict[str, Tensor]:
    """Gradients and counts, which then are as before any step."""
    out = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    for i, router in enumerate(routers(model)):
        out[f"counts of router {i}"] = router.local_tokens_per_expert.clone()
        router.local_tokens_per_expert.zero_()
    model.zero_grad(set_to_none=True)
    return out


def far(
    expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: float = 1e-5
) -> list[str]:
    """Names of what differs."""
    assert expected.keys() == found.keys()
    return [
        name
        for name, value in expected.items()
        if not (value - found[name]).norm() <= tolerance * value.norm()
    ]
