"""Off, or on and unused: every output and gradient is bitwise that of an unpatched process."""

from typing import Any

import pytest
from helpers import interpreters

TRAIN = """
import hashlib, json, torch
from replay_patch.matrix import tiny
import megatron.core
tiny.init()

def digest(tensors):
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().float().contiguous().numpy().tobytes())
    return h.hexdigest()

def train(**over):
    config = tiny.moe_config(**over)
    model = tiny.gpt_model(config)
    tokens = torch.arange(32).reshape(2, 16) % 32
    positions = torch.arange(16).expand(2, -1)
    out = [digest(model.parameters())]
    for _ in range(2):
        model.zero_grad()
        loss = model(tokens, positions, None, labels=tokens).float().mean()
        loss.backward()
        out.append(digest([loss, *(p.grad for p in model.parameters())]))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    with torch.no_grad():
        out.append(digest([model.eval()(tokens, positions, None)]))
    tiny.clear_aux_tracker()
    return out

MODELS = dict(
    dense=dict(num_moe_experts=None, moe_aux_loss_coeff=0.0),
    moe=dict(),
    sigmoid=dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
                 moe_z_loss_coeff=1e-3, moe_router_load_balancing_type="seq_aux_loss"),
    capacity=dict(moe_expert_capacity_factor=1.0),
)
print(json.dumps({name: train(**over, **EXTRA) for name, over in MODELS.items()}))
tiny.shutdown()
"""


@pytest.fixture(scope="module")
def unpatched() -> Any:
    return interpreters.run("EXTRA = {}\n" + TRAIN, bed=True, REPLAY_PATCH="0")


@pytest.mark.parametrize("extra", ["{}", "dict(enable_routing_replay=True)"])
def test_unused_replay_changes_no_bit(unpatched: Any, extra: str) -> None:
    patched = interpreters.run(f"EXTRA = {extra}\n" + TRAIN, bed=True, REPLAY_PATCH="1")

    assert patched == unpatched


def test_the_digests_tell_models_apart(unpatched: Any) -> None:
    assert len({str(v) for v in unpatched.values()}) == len(unpatched) == 4
