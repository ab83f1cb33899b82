"""What becomes of the expert bias with SkyRL's correction of it, in one process: `bias()`.

That is on SkyRL's main branch, and in no release: it gives every mask as [tokens, 1], and asks
nothing before. It stands here in a module of the same name, beside which there is no other SkyRL.
"""

import contextlib
import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from replay_patch.matrix import cpu

MODULE = "skyrl.backends.skyrl_train.utils.replay_utils"
SOURCE = '''
def patch_topk_router_expert_bias_padding_mask():
    from megatron.core.transformer.moe.router import TopKRouter

    before = TopKRouter._apply_expert_bias

    def with_a_column(self, routing_map, padding_mask=None):
        if padding_mask is not None and padding_mask.dim() == 1:
            padding_mask = padding_mask[:, None]
        return before(self, routing_map, padding_mask)

    TopKRouter._apply_expert_bias = with_a_column

def setup_per_microbatch_replay_forward(rollout_expert_indices, router_padding_mask, model):
    """A form that we do not know."""
'''


def megatron_main(self: Any, routing_map: Any, padding_mask: Any = None) -> None:
    """The function of Megatron's main branch (723db5a727)."""
    if padding_mask is not None:
        routing_map = routing_map & (~padding_mask).unsqueeze(-1)
    self.local_tokens_per_expert += routing_map.sum(dim=0)


def counted(tokens: int) -> Any:
    """What is counted of as many tokens, each at two of four experts, the last one masked; and the
    right answer."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    chosen = [[token % 4, (token + 1 + token // 4) % 4] for token in range(tokens)]
    map_ = torch.zeros(tokens, 4, dtype=torch.bool).scatter(1, torch.tensor(chosen), True)
    mask = torch.arange(tokens) == tokens - 1
    counts = torch.zeros(4)
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=counts)
    try:
        TopKRouter._apply_expert_bias(router, map_, padding_mask=mask)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    wanted = [sum(expert in both for both in chosen[:-1]) for expert in range(4)]
    found = router.local_tokens_per_expert.int().tolist()
    return "right" if found == wanted else f"{found}, not {wanted}"


def bias() -> None:
    """Print, for Megatron as it is and for its main branch, what is counted of 4 and of 6 tokens
    with SkyRL's correction alone, on ours, and under ours; and the states of our patches."""
    cpu.install()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, *MODULE.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True)
        path.write_text(SOURCE)
        sys.path.insert(0, folder)
        importlib.import_module(MODULE)
    router = importlib.import_module("megatron.core.transformer.moe.router").TopKRouter
    cpu.patch_megatron()
    own = vars(router)["_apply_expert_bias"]
    print(
        json.dumps(
            {
                f"{'main' if function is megatron_main else 'release'}, {order}": _one(
                    router, function, order
                )
                for function in (own, megatron_main)
                for order in ("alone", "ours first", "theirs first")
            }
        )
    )


def _one(router: Any, function: Any, order: str) -> list[str]:
    import replay_patch

    router._apply_expert_bias = function
    if order == "ours first":
        _activate()
    sys.modules[MODULE].patch_topk_router_expert_bias_padding_mask()
    if order == "theirs first":
        _activate()
    states = {patch.name: patch.state for patch in replay_patch.status().patches}
    names = () if order == "alone" else ("expert_bias_mask", "skyrl_expert_bias")
    found = [counted(4), counted(6), *(states[name] for name in names)]
    replay_patch.deactivate()
    return found


def _activate() -> None:
    import replay_patch

    with contextlib.suppress(replay_patch.PatchNotActive):  # of this form of SkyRL's setup
        replay_patch.activate()
