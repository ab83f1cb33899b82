"""`GPTModel(..., padding_mask=mask)`: as the batch without its rows of padding, on every release.

The batches have as much padding in each sequence, so that they can be cut, and no loss differs.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.exactness import loss
from helpers.padding_cases import (
    BLOCK,
    FULL,
    KINDS,
    LENGTH,
    MOE,
    RELEASE,
    TAKES_MASK,
    TOTAL,
    B,
    K,
    attached_losses,
    batch,
    far,
    loss_of,
    make_model,
    masked_loss,
    routers,
    take,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.router import TopKRouter

from replay_patch import LayoutError, RouteError
from replay_patch.matrix import tiny
from replay_patch.replay import mask_tracker

MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
OURS = pytest.mark.skipif(TAKES_MASK, reason="Megatron carries the mask itself")


def step(model: Any, loss: Callable[[Any], Any]) -> dict[str, Any]:
    loss(model).backward()
    return take(model)


def without_padding(model: Any) -> Any:
    return loss_of(model, LENGTH)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_the_batch_without_padding(kind: str) -> None:
    model = make_model(**loss(kind, 0.2))

    expected, found = step(model, without_padding), step(model, masked_loss)

    assert far(expected, found) == []
    assert expected["counts of router 0"].sum() == B * LENGTH * K
    assert "counts of router 0" in far(expected, step(model, lambda m: loss_of(m, TOTAL)))


@pytest.mark.parametrize("options", [FULL, BLOCK, MOE], ids=["full", "block", "moe"])
def test_a_recompute_sees_the_mask_of_its_forward_and_counts_once(options: dict[str, Any]) -> None:
    expected = step(make_model(), masked_loss)

    assert far(expected, step(make_model(**options), masked_loss), tolerance=0) == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_microbatches_in_flight_keep_their_own_masks(order: tuple[int, ...]) -> None:
    """One of them without padding, and one without a mask."""
    model, lengths = make_model(**FULL), (LENGTH, TOTAL, 3)

    def forward(i: int) -> Any:
        if lengths[i] == TOTAL:
            return loss_of(model, TOTAL, TOTAL, seed=i)
        return masked_loss(model, lengths[i], seed=i)

    alone = []
    for i in range(3):
        forward(i).backward()
        alone.append(take(model))
    losses = [forward(i) for i in range(3)]
    for i in order:
        losses[i].backward()
        assert far(alone[i], take(model), tolerance=0) == []


def test_the_first_mask_may_come_between_a_forward_and_its_recompute() -> None:
    model = make_model(**FULL)
    expected = step(make_model(**FULL), lambda m: loss_of(m, TOTAL))

    before = loss_of(model, TOTAL)
    masked_loss(model)
    take(model)
    before.backward()

    assert far(expected, take(model), tolerance=0) == []


def test_both_losses_of_one_backward_have_their_masks() -> None:
    model = make_model(**FULL)
    expected = step(model, masked_loss)
    other = step(model, lambda m: masked_loss(m, 3, seed=1))

    (masked_loss(model) + masked_loss(model, 3, seed=1)).backward()

    both = {name: value + other[name] for name, value in expected.items()}
    assert far(both, take(model)) == []


def test_other_checkpoints_find_the_mask_too() -> None:
    """Non-reentrant ones; they count twice with and without a mask, as Megatron counts there."""
    from torch.utils.checkpoint import checkpoint

    def wrapped(model: Any) -> Any:
        for layer in model.decoder.layers:
            forward = layer.forward
            layer.forward = lambda *a, f=forward, **k: checkpoint(f, *a, use_reentrant=False, **k)
        return model

    expected, found = step(make_model(), masked_loss), step(wrapped(make_model()), masked_loss)

    for i in range(2):
        assert torch.equal(
            2 * expected.pop(f"counts of router {i}"), found.pop(f"counts of router {i}")
        )
    assert far(expected, found, tolerance=0) == []


def test_a_batch_of_padding_only_gives_no_gradient() -> None:
    found = step(make_model(), lambda model: masked_loss(model, 0))

    assert [
        name for name, value in found.items() if not value.isfinite().all() or value.any()
    ] == []


def test_an_unmasked_call_after_a_masked_one_is_native() -> None:
    model = make_model()
    expected = step(model, lambda m: loss_of(m, TOTAL))
    step(model, masked_loss)

    assert far(expected, step(model, lambda m: loss_of(m, TOTAL)), tolerance=0) == []


def test_a_forward_that_fails_leaves_no_mask_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    expected = step(model, lambda m: loss_of(m, TOTAL))
    with monkeypatch.context() as patched:
        patched.setattr(model.decoder.layers[1].mlp.experts, "forward", None)
        with pytest.raises(TypeError):
            masked_loss(model)
    take(model)

    assert far(expected, step(model, lambda m: loss_of(m, TOTAL)), tolerance=0) == []


def test_another_model_inside_the_call_has_no_mask() -> None:
    outer, inner = make_model(), make_model()
    expected = step(make_model(), lambda m: loss_of(m, TOTAL))
    step(inner, masked_loss)
    seen = []
    outer.decoder.register_forward_pre_hook(
        lambda *_: seen.append(loss_of(inner, TOTAL)), with_kwargs=False
    )

    masked_loss(outer).backward()
    seen[0].backward()

    assert far(expected, take(inner), tolerance=0) == []


def test_evaluation_counts_nothing_and_gives_the_same_output() -> None:
    model = make_model().eval()
    tokens, positions, mask = batch(TOTAL)
    with torch.no_grad():
        plain = model(tokens, positions, None)
        with attached_losses() as losses:
            masked = model(tokens, positions, None, padding_mask=mask)

    assert torch.equal(plain, masked)
    assert losses == []
    assert not any(router.local_tokens_per_expert.any() for router in routers(model))


def test_a_frozen_bias_counts_as_an_unfrozen_one_and_stays() -> None:
    """0.17 on: `frozen_expert_bias` is for the update, which is Megatron's own."""
    model = make_model()
    for router in routers(model):
        router.frozen_expert_bias = True
    before = [router.expert_bias.clone() for router in routers(model)]

    found = step(model, masked_loss)

    assert found["counts of router 0"].sum() == B * LENGTH * K
    assert all(map(torch.equal, before, (router.expert_bias for router in routers(model))))


@pytest.mark.skipif(
    RELEASE in ((0, 16), (0, 17)), reason="Megatron itself gives these MTP routers no mask"
)
@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
def test_routers_of_mtp_blocks_have_the_mask(options: dict[str, Any]) -> None:
    """Before 0.16 that of their own positions, as a batch without padding has them. From 0.18 on
    Megatron shifts it with the tokens, and lets the last position of each sequence count."""
    model = make_model(**MTP, **options)

    def real_only(total: int, **more: Any) -> Any:
        mask = batch(total)[2]
        return lambda model: loss_of(model, total, loss_mask=(~mask).float(), **more)

    found = step(model, real_only(TOTAL, padding_mask=batch(TOTAL)[2]))

    assert [found[f"counts of router {i}"].sum() for i in range(3)] == [B * LENGTH * K] * 3
    if not TAKES_MASK:
        assert far(step(model, real_only(LENGTH)), found) == []


@pytest.mark.parametrize("masked", [False, True])
def test_mtp_with_full_recompute_runs(masked: bool) -> None:
    """0.18 raises TypeError by itself (case 27)."""
    run = masked_loss if masked else lambda model: loss_of(model, TOTAL)

    plain, full = (step(make_model(**MTP, **options), run) for options in ({}, FULL))

    assert far(plain, full, tolerance=0) == []


# --- where we carry it ----------------------------------------------------------------------------


@OURS
def test_the_models_signature_stays_and_the_routers_names_the_mask() -> None:
    """On these releases a model around it may take no mask: whoever asks gets the old answer."""
    for function in (GPTModel.forward, inspect.unwrap(GPTModel.forward)):
        assert "padding_mask" not in inspect.signature(function).parameters
    assert "padding_mask" not in GPTModel.forward.__code__.co_varnames
    assert [*inspect.signature(TopKRouter.forward).parameters][-1] == "padding_mask"


@OURS
@pytest.mark.parametrize(
    "mask, words",
    [
        (torch.zeros(B, TOTAL - 1).bool(), r"\[3, 7\]: expected \[3, 8\], that of the model input"),
        (torch.zeros(TOTAL, B).bool(), r"\[8, 3\]: expected \[3, 8\]"),
        (torch.zeros(B, TOTAL).long(), "is torch.int64: expected a bool tensor"),
    ],
)
def test_another_shape_or_dtype_is_refused_where_it_enters(mask: Any, words: str) -> None:
    model = make_model()

    with pytest.raises(LayoutError, match=words):
        loss_of(model, TOTAL, padding_mask=mask)


@OURS
def test_a_later_stage_takes_the_mask_of_its_hidden_states() -> None:
    model = make_model()
    tokens, positions, mask = batch(TOTAL)
    hidden = model.embedding(tokens, positions).detach()
    model.pre_process = model.decoder.pre_process = False
    for bad in (mask[:, 1:], mask.t()):
        model.set_input_tensor(hidden)
        with pytest.raises(LayoutError, match=r"expected \[3, 8\]"):
            model(None, None, None, labels=tokens, padding_mask=bad)

    model.set_input_tensor(hidden)
    model(None, None, None, labels=tokens, padding_mask=mask).sum().backward()

    assert routers(model)[0].local_tokens_per_expert.sum() == B * LENGTH * K


@OURS
def test_a_recompute_whose_mask_is_gone_is_refused() -> None:
    model = make_model(**FULL)
    kept = []
    model.decoder.register_forward_hook(lambda _, __, out: kept.append(out))

    masked_loss(model)  # its output dies here

    with pytest.raises(
        RouteError, match=r"layer 2: a recompute in a model call whose output is gone"
    ):
        kept[0].sum().backward()


@OURS
def test_nothing_is_kept_of_a_call_whose_graph_is_gone() -> None:
    model = make_model()
    for _ in range(3):
        masked_loss(model).backward()
    with torch.no_grad():
        masked_loss(model)

    calls = mask_tracker.calls_of(model)
    assert [span.forward() for span in calls._forwards.spans] == [None] * 3
    assert calls._at_work.by_thread == {}


@OURS
def test_a_model_that_had_a_mask_has_no_new_attribute() -> None:
    """So it is copied, pickled and saved as before."""
    model, other = make_model(**FULL), make_model(**FULL)
    masked_loss(model).backward()

    for module, fresh in zip(model.modules(), other.modules(), strict=True):
        assert vars(module).keys() == vars(fresh).keys()


def packed(sizes: list[int]) -> PackedSeqParams:
    ends = torch.tensor([0, *sizes]).cumsum(0).int()
    longest = max(sizes)
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
def test_packed_sequences_with_padding_between_them(options: dict[str, Any]) -> None:
    """thd, [1, T]: 3 and 5 tokens, of which each has 4 or 8 rows (case 51)."""
    sizes, lengths = [4, 8], [3, 5]
    model = make_model(torch_attention=True, **options)
    places = [torch.arange(size) for size in sizes]
    positions = torch.cat(places).unsqueeze(0)
    mask = torch.cat([p >= n for p, n in zip(places, lengths, strict=True)]).unsqueeze(0)
    tokens = torch.randint(1, tiny.VOCAB_SIZE, (1, 12)).masked_fill(mask, 0)

    def run(keep: Any, sizes: list[int], **more: Any) -> dict[str, Any]:
        t, p = tokens[keep].unsqueeze(0), positions[keep].unsqueeze(0)
        losses = model(t, p, None, labels=t, packed_seq_params=packed(sizes), **more)
        (losses * ~mask[keep].unsqueeze(0)).sum().backward()
        return take(model)

    expected = run(~mask, lengths)
    found = run(torch.ones_like(mask), sizes, padding_mask=mask)

    assert mask[0].nonzero().flatten().tolist() == [3, 9, 10, 11]
    assert far(expected, found) == []
    assert found["counts of router 0"].sum() == 8 * K
