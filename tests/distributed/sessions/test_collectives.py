"""Our collectives send only what NCCL and HCCL both carry, on every chip."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from replay_patch.matrix import tiny
from replay_patch.matrix.ranks import launch
from replay_patch.replay import padding_rows
from replay_patch.sessions import gather

# Of HCCL's dtypes on all Atlas products (HcclAllGather and HcclAllReduce in CANN 8.5's HCCL API
# reference, hiascend.com) those that ProcessGroupNCCL has. No bool in either; int64 is reduced
# slowly on Atlas A2, not at all on the 300I Duo, and on Ascend 950 within one node.
ALLOWED = {
    "all_gather": {torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32},
    "all_reduce": {torch.int8, torch.int32, torch.float16, torch.float32},
}
EXPERTS = {torch.uint8: 8, torch.int16: 400, torch.int32: 40_000}


def sending_rank(rank: int, world: int, init_file: str) -> tuple[set[tuple[str, Any]], int]:
    """The dtypes that a rank has sent, and the number of real rows of both."""
    tiny.init(world, rank, init_file, tensor_model_parallel_size=2)
    sent: set[tuple[str, Any]] = set()

    def recorded(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            for given in args:
                tensors = given if isinstance(given, list) else [given]
                sent.update((name, tensor.dtype) for tensor in tensors)
            return original(*args, **kwargs)

        return call

    for name in ALLOWED:
        setattr(dist, name, recorded(name))
    cpu = torch.device("cpu")
    for dtype, experts in EXPERTS.items():
        ids, rows = torch.tensor([[rank, 5]], dtype=dtype), torch.tensor([rank])
        found = gather.routes(gather.RankRecord([((2,), rows)], {3: [ids]}, experts, 2, cpu))
        assert found[0].expert_ids.tolist() == [[[0, 5]], [[1, 5]]]
    rows = padding_rows.Rows(torch.arange(4) > rank, cpu)
    total = rows.total(parallel_state.get_tensor_model_parallel_group())
    assert rows.scale(total, world).equal(rows.scale(total.long(), world))
    return sent, int(total)


def test_only_dtypes_that_nccl_and_hccl_carry_are_sent() -> None:
    for sent, total in launch(sending_rank, 2):
        assert total == 1 + 2
        assert {name for name, _ in sent} == ALLOWED.keys()
        assert [one for one in sent if one[1] not in ALLOWED[one[0]]] == []
