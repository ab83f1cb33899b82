"""Where a padding mask enters, and which rows are which: no Megatron."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from replay_patch import LayoutError, RouteError
from replay_patch.megatron import parallel_ranks
from replay_patch.patches.megatron import block_recompute_mask, mtp_recompute_mask
from replay_patch.replay import padding_rows

B, S, TP = 2, 8, 2
MASK = torch.arange(S).expand(B, S) >= torch.tensor([[5], [7]])
IDS = torch.zeros(B, S)


def model(sequence_parallel: bool = True, dispatcher: str = "alltoall") -> Any:
    config = SimpleNamespace(
        tensor_model_parallel_size=TP,
        sequence_parallel=sequence_parallel,
        moe_token_dispatcher_type=dispatcher,
    )
    return SimpleNamespace(config=config, parameters=lambda: iter(()), layer_number=3)


@pytest.fixture(params=[0, 1])
def rank(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(parallel_ranks, "tp_rank", lambda: request.param)
    return int(request.param)


def part(rank: int) -> Tensor:
    return MASK.chunk(TP, dim=1)[rank]


def hidden(length: int) -> Tensor:
    return torch.zeros(length, B, 4)


def real_rows(found: padding_rows.Padding, number: int) -> Tensor:
    return found.rows(number, SimpleNamespace(layer_number=3)).real.flatten()


@pytest.mark.parametrize(
    "mask, entering",
    [(MASK, "ids"), (MASK, "hidden states"), ("part", "hidden states"), (MASK, "not known")],
    ids=["embedding", "later stage", "later stage, cut by the caller", "nothing to compare with"],
)
def test_a_mask_is_cut_once_for_sequence_parallelism(rank: int, mask: Any, entering: str) -> None:
    """Case 52: of 8 positions a router of two ranks has 4, on every kind of stage."""
    ids = IDS if entering == "ids" else None
    given = hidden(S // TP) if entering == "hidden states" else None

    found = padding_rows.padding_of_model_call(
        model(), part(rank) if mask == "part" else mask, ids, given
    )

    rows = real_rows(found, S // TP * B)
    assert torch.equal(rows, ~part(rank).t().flatten())  # sequence-major


def test_without_sequence_parallelism_each_rank_has_all_rows() -> None:
    for ids, given in ((IDS, None), (None, hidden(S))):
        found = padding_rows.padding_of_model_call(model(sequence_parallel=False), MASK, ids, given)
        assert torch.equal(real_rows(found, S * B), ~MASK.t().flatten())


def test_a_router_that_gathers_has_both_kinds_of_rows(rank: int) -> None:
    found = padding_rows.padding_of_model_call(model(dispatcher="alltoall_seq"), MASK, IDS, None)

    assert torch.equal(real_rows(found, S // TP * B), ~part(rank).t().flatten())
    assert torch.equal(real_rows(found, S * B), ~MASK.t().flatten())
    with pytest.raises(RouteError, match="the whole mask"):
        padding_rows.padding_of_model_call(
            model(dispatcher="alltoall_seq"), part(rank), None, hidden(S // TP)
        )


@pytest.mark.parametrize(
    "mask, ids, given, words",
    [
        (
            MASK.t(),
            IDS,
            None,
            r"has the shape \[8, 2\]: expected \[2, 8\], that of the model input",
        ),
        (MASK[:, 1:], IDS, None, r"\[2, 7\]: expected \[2, 8\]"),
        (MASK[:, :4], IDS, None, r"\[2, 4\]: expected \[2, 8\]"),
        (MASK[:, 1:], None, hidden(4), r"\[2, 7\]: expected \[2, 8\]"),
        (MASK[0], IDS, None, r"\[8\]: expected \[2, 8\]"),
        (MASK.int(), IDS, None, "padding_mask is torch.int32: expected a bool tensor"),
        (MASK.tolist(), IDS, None, "padding_mask is list: expected a bool tensor"),
        (MASK[:, :7], torch.zeros(B, 7), None, r"expected \[2, 'a multiple of 2'\]"),
    ],
)
def test_what_is_no_mask_of_the_input_is_refused(
    mask: Any, ids: Any, given: Any, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        padding_rows.padding_of_model_call(model(), mask, ids, given)


def test_a_router_with_other_rows_than_the_mask_is_refused() -> None:
    found = padding_rows.padding_of_model_call(model(sequence_parallel=False), MASK, IDS, None)

    with pytest.raises(LayoutError, match=r"layer 3: the router has 15 rows, and .* is for 16"):
        real_rows(found, 15)


def test_a_layer_takes_its_part_and_leaves_a_part_alone(rank: int) -> None:
    """0.16 on, where Megatron's models hand on the mask."""
    fits = part(rank).contiguous()

    assert torch.equal(padding_rows.mask_of_layer(model(), MASK, hidden(S // TP)), fits)
    assert padding_rows.mask_of_layer(model(), fits, hidden(S // TP)) is fits
    assert padding_rows.mask_of_layer(model(sequence_parallel=False), MASK, hidden(S)) is MASK
    assert padding_rows.mask_of_layer(model(), MASK, None) is MASK
    for layer, mask in ((model(), MASK[:, 1:]), (model(sequence_parallel=False), MASK)):
        with pytest.raises(LayoutError, match=r"expected \[2, 4\], that of layer 3"):
            padding_rows.mask_of_layer(layer, mask, hidden(S // TP))


def test_a_loss_is_scaled_to_the_real_rows() -> None:
    rows = padding_rows.Rows(torch.tensor([False, True, True, True]), torch.device("cpu"))

    assert rows.index.tolist() == [0]
    assert rows.total(None) == 1
    assert rows.scale(torch.tensor(1), 1) == 16
    assert rows.scale(torch.tensor(2), 3) == 36
    assert rows.scale(torch.tensor(0), 1) == 16  # nothing is real: the sums are zero


def test_a_sum_of_rows_leaves_out_padding_and_no_other_sum_does() -> None:
    rows = padding_rows.Rows(torch.tensor([False, True]), torch.device("cpu"))
    chosen = torch.tensor([[True, False], [True, True]])

    with padding_rows.SumOfRows(rows):
        assert chosen.sum(dim=0).tolist() == [1, 0]
        assert chosen.sum(dim=1).tolist() == [1, 2]
        assert chosen.float().sum(dim=0).tolist() == [2.0, 1.0]
    assert chosen.sum(dim=0).tolist() == [2, 1]


# --- masks through a checkpoint -------------------------------------------------------------------


class Checkpointed:
    """A layer whose recompute is a closure that is called again, and which keeps tensors only."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.passed: list[Any] = []
        self.again: Any = None
        self.name = "layer"

    def checkpoint(self, function: Any, *args: Any) -> Any:
        self.passed += args
        self.again = lambda: function(*args)
        return function(*args)

    def _proj_and_transformer_layer(self, hidden: Any, padding_mask: Any = None) -> Any:
        self.seen.append(padding_mask)
        return hidden

    def _checkpointed_forward(self, hidden: Any) -> Any:
        assert self.name == "layer"
        return self.checkpoint(lambda h: self._proj_and_transformer_layer(hidden=h), hidden)

    def _get_layer(self, number: int) -> Any:
        return lambda hidden, padding_mask=None: (self.seen.append(padding_mask), hidden)[1]

    def block(self, hidden: Any, padding_mask: Any = None) -> Any:
        """Layer 0 is recomputed, and handed the mask; layer 1 is neither."""
        layers = [self._get_layer(i) for i in range(2)]
        self.checkpoint(lambda h, m: layers[0](h, padding_mask=m), hidden, padding_mask)
        return layers[1](hidden)


def test_the_mask_of_an_mtp_block_is_closed_over_and_there_in_the_recompute() -> None:
    """Cases 27 and 28: a checkpoint keeps its arguments, and takes no object but tensors."""
    layer, mask = Checkpointed(), object()
    forward = mtp_recompute_mask._masked_checkpointed_forward(Checkpointed._checkpointed_forward)

    assert forward(layer, "hidden", padding_mask=mask) == "hidden"
    layer.again()

    assert layer.seen == [mask, mask]
    assert layer.passed == ["hidden"]


def test_an_mtp_block_without_a_mask_is_the_original() -> None:
    layer = Checkpointed()

    mtp_recompute_mask._masked_checkpointed_forward(Checkpointed._checkpointed_forward)(
        layer, "h", padding_mask=None
    )

    assert layer.seen == [None]


@pytest.mark.parametrize("mask", [object(), None])
def test_layers_that_are_not_recomputed_have_the_mask_of_their_block(mask: Any) -> None:
    block = Checkpointed()

    block_recompute_mask._masked_checkpointed_forward(Checkpointed.block)(block, "hidden", mask)
    block.again()

    assert block.seen == [mask, mask, mask]
