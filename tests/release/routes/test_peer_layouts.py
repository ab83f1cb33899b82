"""docs/layouts.md says what verl and SkyRL pack: compared with these packages, rank by rank."""

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import doc_examples, peer_packages
from megatron.core import fp8_utils, parallel_state
from torch import Tensor

from replay_patch import TokenLayout

pytestmark = pytest.mark.exhaustive  # it downloads verl and SkyRL

DOCS = doc_examples.run("layouts.md")
LENGTHS = [[5], [1, 7, 3], [16, 33, 2, 40], [150, 9]]
CUTS = [
    {"tp_size": tp, "tp_rank": 0, "cp_size": cp, "cp_rank": rank, "sequence_parallel": tp > 1}
    for tp, cp in itertools.product([1, 2], [1, 2, 4])
    for rank in range(cp)
]
cuts = pytest.mark.parametrize(
    "cut", CUTS, ids=[f"TP{c['tp_size']} CP{c['cp_size']} rank {c['cp_rank']}" for c in CUTS]
)
fp8 = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])


@pytest.fixture(autouse=True)
def _peers() -> None:
    try:
        for name in peer_packages.VERSIONS:
            peer_packages.folder(name)
    except RuntimeError as error:
        pytest.skip(f"the peers cannot be downloaded: {error}")


@pytest.fixture(autouse=True)
def _placed(cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a rank of process groups of these sizes, as far as is asked."""
    for name, value in {
        "get_tensor_model_parallel_world_size": cut["tp_size"],
        "get_tensor_model_parallel_rank": cut["tp_rank"],
        "get_context_parallel_world_size": cut["cp_size"],
        "get_context_parallel_rank": cut["cp_rank"],
        "get_context_parallel_group": None,
    }.items():
        monkeypatch.setattr(parallel_state, name, lambda *_, value=value, **__: value)


def tokens_of(lengths: list[int]) -> list[Tensor]:
    """Numbered from 1 on; 0 is padding."""
    return list((torch.arange(sum(lengths)) + 1).split(lengths))


def left_padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """(tokens, attention mask), [B, S], as trainers hold them."""
    size = max(lengths) + 3
    tokens = torch.zeros(len(lengths), size, dtype=torch.int64)
    for row, own in zip(tokens, tokens_of(lengths), strict=True):
        row[size - len(own) :] = own
    return tokens, tokens > 0


def nested(lengths: list[int]) -> Tensor:
    return torch.nested.as_nested_tensor(tokens_of(lengths), layout=torch.jagged)


def check(layout: TokenLayout, theirs: Tensor) -> None:
    tokens = torch.arange(layout.num_tokens) + 1
    assert layout.align(tokens, 0).tolist() == theirs.tolist()


@fp8
@cuts
def test_verl_packed(cut: dict[str, Any], fp8: bool) -> None:
    util = peer_packages.verl("models.mcore.util")

    for lengths in LENGTHS:
        layout = DOCS["verl_packed"](lengths, cut, fp8)
        packed, params, _ = util.preprocess_thd_engine(nested(lengths), use_fp8_padding=fp8)
        older, _ = util.preprocess_packed_seqs(*left_padded(lengths), use_fp8_padding=fp8)

        check(layout, packed)
        check(layout, older)
        assert params.cu_seqlens_q_padded.diff().tolist() == list(layout.padded_lengths)


@pytest.mark.parametrize(
    "options",
    [
        {"min_local_rows": 64},
        {"length_bucket": 24},
        {"min_local_rows": 100, "length_bucket": 8, "cp_layout": "contiguous"},
        {"cp_layout": "contiguous"},
    ],
    ids=str,
)
@fp8
@cuts
def test_verl_packed_otherwise(cut: dict[str, Any], fp8: bool, options: dict[str, Any]) -> None:
    util = peer_packages.verl("models.mcore.util")
    theirs = dict(options)
    if "length_bucket" in theirs:
        theirs["pad_to_length_bucket"] = theirs.pop("length_bucket")

    for lengths in LENGTHS:
        with takes_contiguous(util):
            packed, _, _ = util.preprocess_thd_engine(
                nested(lengths), use_fp8_padding=fp8, **theirs
            )

        check(DOCS["verl_packed"](lengths, cut, fp8, **options), packed)


@contextlib.contextmanager
def takes_contiguous(util: Any) -> Iterator[None]:
    """Only Megatron's main has a field for that, without which verl refuses at its end."""
    own = util.PackedSeqParams
    flags = util._PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE
    known = inspect.signature(own).parameters
    util.PackedSeqParams = lambda **given: own(**{k: v for k, v in given.items() if k in known})
    util._PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE = True
    try:
        yield
    finally:
        util.PackedSeqParams = own
        util._PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE = flags


@fp8
@cuts
def test_verl_padded(cut: dict[str, Any], fp8: bool) -> None:
    util = peer_packages.verl("models.mcore.util")

    for lengths in LENGTHS:
        layout = DOCS["verl_padded"](lengths, cut, fp8)
        padded, mask, _ = util.preprocess_bshd_engine(nested(lengths), use_fp8_padding=fp8)

        check(layout, padded)
        assert torch.equal(layout.padding_mask, ~mask)


@fp8
@cuts
def test_skyrl_packed(cut: dict[str, Any], fp8: bool) -> None:
    replay = peer_packages.skyrl("backends.skyrl_train.utils.replay_utils")

    for lengths in LENGTHS:
        tokens, mask = left_padded(lengths)
        packed = replay._pack_replay_indices(tokens[..., None, None], mask, fp8_enabled=fp8)

        check(DOCS["skyrl_packed"](lengths, cut, fp8), packed[..., 0, 0])


@fp8
@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut["cp_size"] == 1], ids=["TP1", "TP2"])
def test_skyrl_padded(cut: dict[str, Any], fp8: bool) -> None:
    replay = peer_packages.skyrl("backends.skyrl_train.utils.replay_utils")

    for lengths in LENGTHS:
        tokens, mask = left_padded(lengths)
        padded = replay._remove_left_padding_from_indices(
            tokens[..., None, None], mask, fp8_enabled=fp8
        )

        check(DOCS["skyrl_padded"](lengths, cut, fp8), padded[..., 0, 0])


@cuts
def test_skyrl_several_sequences_in_a_row(cut: dict[str, Any]) -> None:
    try:
        utils = peer_packages.skyrl("backends.skyrl_train.distributed.megatron.megatron_utils")
    except ImportError as error:  # it needs names that only some releases have
        pytest.skip(str(error))
    lengths = [5, 3, 8]
    layout = DOCS["skyrl_packed"](lengths, cut)
    row = torch.cat(
        [
            torch.cat([own, own.new_zeros(size - len(own))])
            for own, size in zip(tokens_of(lengths), layout.padded_lengths, strict=True)
        ]
    )[None]

    packed, _ = utils.preprocess_packed_seqs(row, row > 0, sub_seq_lengths=[lengths])

    check(layout, packed)


@cuts
def test_rows_for_fp8_are_a_multiple_on_every_rank(cut: dict[str, Any]) -> None:
    if hasattr(fp8_utils, "get_fp8_align_size"):  # what the page says of it
        assert fp8_utils.get_fp8_align_size(None) == 16
        assert fp8_utils.get_fp8_align_size("mxfp8") == 32

    for lengths in LENGTHS:
        assert len(DOCS["megatron_fp8"](lengths, cut).rows) % 16 == 0
