"""For tests/release/patching/test_off.py."""

import hashlib
from collections.abc import Iterable
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"num_moe_experts": None, "moe_aux_loss_coeff": 0.0},
    "moe": {},
    "sigmoid": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_z_loss_coeff": 1e-3,
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "capacity": {"moe_expert_capacity_factor": 1.0},
}


def trained(options: dict[str, Any]) -> dict[str, list[str]]:
    """Digests of all outputs and gradients of two training steps, for each of the models."""
    import torch

    from replay_patch.matrix import tiny

    tiny.init()
    digests = {name: _train(torch, tiny, **model, **options) for name, model in MODELS.items()}
    tiny.shutdown()
    return digests


def _train(torch: Any, tiny: Any, **options: Any) -> list[str]:
    model = tiny.gpt_model(tiny.moe_config(**options))
    tokens = torch.arange(32).reshape(2, 16) % 32
    positions = torch.arange(16).expand(2, -1)
    digests = [_digest(model.parameters())]
    for _ in range(2):
        model.zero_grad()
        loss = model(tokens, positions, None, labels=tokens).float().mean()
        loss.backward()
        digests.append(_digest([loss, *(p.grad for p in model.parameters())]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    with torch.no_grad():
        digests.append(_digest([model.eval()(tokens, positions, None)]))
    tiny.clear_aux_tracker()
    return digests


def _digest(tensors: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()
