"""SkyRL's own modules on the CPU bed, tiny batches for them, and what their tokens should get.

For scripts that `helpers.trainers.run` runs. E experts, K top-k; a *place* is (sample, position) of
a real token, counted without padding.
"""

import importlib
import json
import re
import sys
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import typing_extensions
from helpers import peer_packages

from replay_patch.matrix import cpu, tiny

E, K = 8, 2

Place = tuple[int, int]
Row = Place | None
"""A place, or None for padding."""


def prepare() -> None:
    """Make SkyRL importable. Ranks can be forked after it."""
    # jaxtyping's annotations in a TypedDict: typing's own refuses them before Python 3.12.
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    sys.path.append(
        str(peer_packages.folder("skyrl") / "skyrl-gym")
    )  # a second package in the same wheel
    cpu.install()
    import megatron.core  # noqa: F401

    cpu.patch_megatron()


def module(name: str) -> Any:
    """A module of SkyRL, as "train.trainer"; no `__init__` of it is left out."""
    return importlib.import_module(f"skyrl.{name}")


def replay_utils() -> Any:
    """The module with SkyRL's replay."""
    return module("backends.skyrl_train.utils.replay_utils")


def config(**over: Any) -> Any:
    """Of a model with replay on."""
    return tiny.moe_config(
        **{
            "num_moe_experts": E,
            "moe_router_topk": K,
            "moe_enable_routing_replay": True,
            "moe_router_load_balancing_type": "none",
            **over,
        }
    )


def wrapper(chunks: list[Any], *, packed: bool = False) -> Any:
    """SkyRL's MegatronModelWrapper around a model, which is wrapped for data parallelism before."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    wrapped = [
        DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk)
        for chunk in chunks
    ]
    settings = module("train.config").TrainerConfig()
    settings.remove_microbatch_padding = packed
    settings.algorithm.policy_loss_type = "cross_entropy"
    made = module("backends.skyrl_train.workers.megatron.megatron_model_wrapper")
    return made.MegatronModelWrapper(settings, wrapped)


def experts(sample: int, position: int, layer: int) -> list[int]:
    """What the rollout of this token says: K experts, in another order than sorted ones."""
    first = (3 * sample + 5 * position + 7 * layer) % E
    return [first, (first + 1 + (sample + position + layer) % (E - 1)) % E]


def micro_batch(
    lengths: Sequence[int],
    width: int,
    layers: int,
    *,
    samples: Sequence[int] | None = None,
    holes: Iterable[Place] = (),
    routes: bool = True,
    fill: int = 0,
) -> dict[str, Any]:
    """What SkyRL's worker gives to a schedule: left padding, and routes of all layers.

    Args:
        samples: the numbers of its samples; 0, 1, ... if None.
        holes: real tokens without a route: zeros, as SkyRL fills them.
        fill: what is in padding.
    """
    import torch

    numbers = list(range(len(lengths))) if samples is None else list(samples)
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    ids = torch.full((len(lengths), width, layers, K), fill, dtype=torch.int32)
    for row, (sample, length) in enumerate(zip(numbers, lengths, strict=True)):
        mask[row, width - length :] = 1
        for position in range(length):
            for layer in range(layers):
                given = experts(sample, position, layer + 1)
                if (sample, position) in holes:
                    given = [0] * K
                ids[row, width - length + position, layer] = torch.tensor(given)
    tokens = torch.randint(
        1, tiny.VOCAB_SIZE, mask.shape, generator=torch.Generator().manual_seed(sum(numbers))
    )
    actions = width - 1
    return {
        "sequences": tokens * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "num_actions": actions,
        "old_action_log_probs": torch.zeros(len(lengths), actions),
        "base_action_log_probs": None,
        "advantages": torch.ones(len(lengths), actions),
        "loss_mask": mask[:, 1:].float(),
        "rollout_action_logprobs": None,
        "action_mask": mask[:, 1:],
        "rollout_expert_indices": ids if routes else None,
        "num_microbatches": 1,
        "num_real_microbatches": 1,
    }


def run(wrapped: Any, batches: list[dict[str, Any]], *, train: bool = True) -> Any:
    """One schedule of SkyRL's."""
    import torch

    for batch in batches:
        batch["num_microbatches"] = batch["num_real_microbatches"] = len(batches)
    where = {
        "micro_batches": batches,
        "seq_len": batches[0]["sequences"].shape[1],
        "micro_batch_size": len(batches[0]["sequences"]),
    }
    if train:
        return wrapped.forward_backward_mini_batch(**where, loss_fn="cross_entropy")
    with torch.no_grad():
        return wrapped.forward(**where)


def call_unpacked(model: Any, batch: dict[str, Any], *, before_backward: Any) -> None:
    """One forward and backward of a model, as SkyRL's forward step prepares an unpacked batch."""
    utils = module("backends.skyrl_train.distributed.megatron.megatron_utils")
    tokens, mask, positions = utils.remove_left_padding(
        batch["sequences"], batch["attention_mask"].bool(), batch["position_ids"]
    )
    # With labels: without them 0.16 cannot run an MTP block.
    attention = utils.to_te_attention_mask(mask)
    output = model(tokens, positions, attention, labels=tokens)
    before_backward()
    output.sum().backward()


# --- what the routers did -------------------------------------------------------------------------


class Calls(list[tuple[int, int, bool, Any, Any]]):
    """(layer, MTP depth, in a backward, routing map, native map) of each router call."""

    def __init__(self, *chunks: Any) -> None:
        import torch
        from megatron.core.transformer.moe.router import TopKRouter

        super().__init__()
        for chunk in chunks:
            for name, part in chunk.named_modules():
                if isinstance(part, TopKRouter):
                    block = re.search(r"mtp\.layers\.(\d+)", name)
                    depth = int(block[1]) + 1 if block else 0
                    part.register_forward_hook(self._noting(depth))
        self.torch = torch

    def _noting(self, depth: int) -> Any:
        def note(router: Any, args: Any, output: Any) -> None:
            torch = self.torch
            rows = args[0].detach().flatten(0, -2).float()
            scores = rows @ router.weight.detach().float().t()
            native = torch.zeros_like(scores, dtype=torch.bool)
            native.scatter_(1, scores.topk(K, dim=1).indices, True)
            backward = torch._C._current_graph_task_id() != -1
            found = output[1].detach().flatten(0, -2)
            self.append((router.layer_number, depth, backward, found, native))

        return note

    def maps(self, layer: int, *, depth: int = 0, backward: bool = False) -> list[tuple[Any, Any]]:
        """(routing map, native map) of each call of one router."""
        where = (layer, depth, backward)
        return [(found, native) for *at, found, native in self if tuple(at) == where]


def unpacked_rows(samples: Sequence[int], lengths: Sequence[int], multiple: int = 1) -> list[Row]:
    """The token of each router row: position after position."""
    longest = -(-max(lengths) // multiple) * multiple
    return [
        (sample, position) if position < length else None
        for position in range(longest)
        for sample, length in zip(samples, lengths, strict=True)
    ]


def packed_rows(samples: Sequence[int], lengths: Sequence[int], multiple: int = 1) -> list[Row]:
    """The token of each router row: sequence after sequence."""
    rows: list[Row] = []
    for sample, length in zip(samples, lengths, strict=True):
        rows += [(sample, position) for position in range(length)]
        rows += [None] * (-length % multiple)
    return rows


def wrong(
    call: tuple[Any, Any], rows: Sequence[Row], layer: int, holes: Iterable[Place] = ()
) -> list[str]:
    """What is not as it should be in one router call; [] if all is."""
    found, native = (each.tolist() for each in call)
    if len(found) != len(rows):
        return [f"{len(found)} rows, not {len(rows)}"]
    out, load = [], [0] * E
    for number, (row, map_, own) in enumerate(zip(rows, found, native, strict=True)):
        chosen = [expert for expert in range(E) if map_[expert]]
        if row is None:
            for expert in chosen:
                load[expert] += 1
            if len(chosen) != K:
                out.append(f"padding {number}: {chosen}")
            continue
        wanted = sorted(experts(*row, layer))
        if row in holes:
            wanted = [expert for expert in range(E) if own[expert]]
        if chosen != wanted:
            out.append(f"{row}: {chosen}, not {wanted}")
    if max(load) - min(load) > 1:
        out.append(f"load of padding {load}")
    return out


def import_error() -> None:
    """Print why SkyRL cannot be imported on this Megatron."""
    prepare()
    try:
        module("backends.skyrl_train.distributed.megatron.megatron_utils")
    except ImportError as error:
        print(json.dumps(str(error)))
