"""`padding_mask` for the releases without it (0.12 ... 0.15): rows of padding count in no loss."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from replay_patch.patching import Patch, Transaction, probe
from replay_patch.patching.rebinding import with_globals
from replay_patch.refusals import installed_megatron

_MODULE = "megatron.core.models.gpt.gpt_model"
_MODEL = f"{_MODULE}:GPTModel"
_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_SCORES = "compute_routing_scores_for_aux_loss"
_LOSSES = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")


def _needed() -> tuple[bool, str]:
    takes = "padding_mask" in probe.parameters(f"{_MODEL}.forward")
    return not takes, f"GPTModel.forward takes {'a' if takes else 'no'} padding_mask"


def _apply(transaction: Transaction) -> None:
    import megatron.core.transformer.moe.router as module

    router, model = module.TopKRouter, probe.find(_MODEL)
    wrappers = {"apply_z_loss": _z_loss, "forward": _wrapped_router_forward}
    if "_apply_aux_loss" in vars(router):  # from 0.14 on
        wrappers |= {name: _aux_loss for name in _LOSSES if name in vars(router)}
        wrappers["attach_and_log_load_balancing_loss"] = _attached_loss
    else:
        wrappers |= {_SCORES: _scores, "apply_load_balancing_loss": _load_balancing}
        if _SCORES in vars(router) and not _gives_map(vars(router)[_SCORES]):  # 0.12
            wrappers["aux_loss_load_balancing"] = _load_balancing_of_0_12
    missing = sorted(wrappers.keys() - vars(router).keys())
    if missing:
        raise LookupError(
            f"TopKRouter of {installed_megatron()} is not the class that we know: it has no "
            f"{', '.join(missing)}"
        )
    for name, make in wrappers.items():
        if name != "forward":
            with_globals(vars(router)[name], {})  # raises here, and not in the first forward
        transaction.wrap(router, name, make)
    transaction.wrap(model, "forward", _wrapped_model_forward)
    if "build_schedule_plan" in vars(model):  # from 0.14 on
        transaction.wrap(model, "build_schedule_plan", _wrapped_build_schedule_plan)


def _gives_map(compute: Any) -> bool:
    """Whether a release's scores for the auxiliary loss come with a map of their own."""
    import torch

    router = SimpleNamespace(score_function="softmax", topk=1)
    return isinstance(compute(router, torch.zeros(1, 2)), tuple)


# GPTModel's signature stays: sessions and trainers ask it whether to hand over a mask, and on these
# releases a model around it may not take one. A mask that is given is taken all the same.


def _wrapped_model_forward(original: Callable[..., Any]) -> Any:
    from replay_patch.replay import mask_tracker

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.pop("padding_mask", None)
        if mask is None and not mask_tracker.has_had_mask(self):
            return original(self, *args, **kwargs)
        padding = _padding(original, self, mask, args, kwargs)
        recompute = getattr(self.config, "recompute_granularity", None) is not None
        call = functools.partial(original, self, *args, **kwargs)
        return mask_tracker.calls_of(self).run(padding, call, recompute)

    return forward


def _wrapped_build_schedule_plan(original: Callable[..., Any]) -> Any:
    from replay_patch.replay import mask_tracker

    def build_schedule_plan(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.pop("padding_mask", None)
        if mask is not None or mask_tracker.has_had_mask(self):
            padding = _padding(original, self, mask, args, kwargs)
            mask_tracker.calls_of(self).planned_padding = padding
        return original(self, *args, **kwargs)

    return build_schedule_plan


def _padding(original: Any, model: Any, mask: Any, args: Any, kwargs: Any) -> Any:
    """The padding of a call, or None: of its own mask, or of the one that a session holds."""
    from replay_patch.replay import mask_tracker, padding_rows

    calls = mask_tracker.calls_of(model)
    of_session, calls.next_mask = calls.next_mask, None
    if mask is None and of_session is None:
        return None
    arguments = inspect.signature(original).bind_partial(model, *args, **kwargs).arguments
    hidden, input_ids = arguments.get("decoder_input"), arguments.get("input_ids")
    if hidden is None and not model.pre_process:
        hidden, input_ids = model.decoder.input_tensor, None
    input_ids = None if hidden is not None else input_ids
    if of_session is not None and mask is None:
        return padding_rows.padding_of_session(model, of_session, input_ids, hidden)
    return padding_rows.padding_of_model_call(model, mask, input_ids, hidden)


def _wrapped_router_forward(original: Callable[..., Any]) -> Any:
    from replay_patch.patching.compiling import opaque
    from replay_patch.replay import mask_tracker, padding_rows

    calls_by_router = mask_tracker.calls_by_router

    @opaque
    def masked(router: Any, hidden: Any, mask: Any, kwargs: dict[str, Any]) -> Any:
        padding = (
            mask_tracker.padding_of(router)
            if mask is None
            else padding_rows.padding_of_router_call(router, mask, hidden)
        )
        call = functools.partial(original, router, hidden, **kwargs)
        return call() if padding is None else padding_rows.run_with_padding(router, padding, call)

    def forward(self: Any, input: Any, padding_mask: Any = None, **kwargs: Any) -> Any:
        if padding_mask is None and not calls_by_router:
            return original(self, input, **kwargs)
        return masked(self, input, padding_mask, kwargs)

    # By position, too, as layers of 0.16 and later call it, unless other code has wrapped it.
    of_original = inspect.signature(original).parameters.values()
    kinds = {p.kind for p in of_original}
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.KEYWORD_ONLY in kinds:
        kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [p for p in of_original if p.name != "padding_mask"]
    catch_all = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    parameters = [p for p in parameters if p not in catch_all]
    parameters += [inspect.Parameter("padding_mask", kind, default=None), *catch_all]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def _masked(method_with_mask: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """A wrapper for a router's method: calls with a mask run `method_with_mask(rows, original,
    router, *arguments)`. The first argument has R rows, and `rows.real` is bool [R, 1]."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        from replay_patch.replay import padding_rows

        at_work = padding_rows.padding_at_work.by_thread

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not at_work:
                return original(self, *args, **kwargs)
            first = args[0] if args else next(iter(kwargs.values()))  # 0.12 gives it by name
            rows = padding_rows.rows_at_work(self, len(first))
            if rows is None:
                return original(self, *args, **kwargs)
            return method_with_mask(rows, original, self, *args, **kwargs)

        return method

    return make


@_masked
def _z_loss(rows: Any, original: Any, router: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    z_loss = _names(original)["z_loss_func"]

    def of_real_rows(logits: Any, *args: Any, **kwargs: Any) -> Any:
        real = logits.index_select(0, rows.index)
        return z_loss(real, *args, **kwargs) if len(real) else logits.new_zeros(())

    names = {"z_loss_func": of_real_rows, **_scaled_by_tokens(router, original, rows)}
    return with_globals(original, names)(router, logits, *args, **kwargs)


@_masked
def _aux_loss(
    rows: Any,
    original: Any,
    router: Any,
    probs: Any,
    scores: Any,
    routing_map: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """From 0.14 on. The rows of all ranks are known from what the release itself reduces."""
    names = _names(original)
    reduce = names["reduce_from_tensor_model_parallel_region"]
    switch = names["switch_load_balancing_loss_func"]
    reduced: list[Any] = []

    def noted(tokens: Any, group: Any) -> Any:
        out = reduce(tokens, group)
        reduced[:] = [out.sum(), group.size()]
        return out

    def scaled(*args: Any, **kwargs: Any) -> Any:
        tokens, ranks = reduced
        return switch(*args, **kwargs) * rows.scale(tokens / kwargs["topk"], ranks)

    of_real_rows = {
        "reduce_from_tensor_model_parallel_region": noted,
        "switch_load_balancing_loss_func": scaled,
    }
    real = scores * rows.real, routing_map & rows.real
    return with_globals(original, of_real_rows)(router, probs, *real, *args, **kwargs)


@_masked
def _attached_loss(rows: Any, original: Any, router: Any, *args: Any, **kwargs: Any) -> Any:
    names = _scaled_by_tokens(router, original, rows)
    return with_globals(original, names)(router, *args, **kwargs)


@_masked
def _scores(rows: Any, original: Any, router: Any, *args: Any, **kwargs: Any) -> Any:
    """0.12 and 0.13; 0.13 gives the map that it counts, too."""
    out = original(router, *args, **kwargs)
    if isinstance(out, tuple):
        return out[0] * rows.real, out[1] & rows.real
    return out * rows.real


@_masked
def _load_balancing(
    rows: Any, original: Any, router: Any, activation: Any, load_balancing_loss_func: Any
) -> Any:
    """0.12 and 0.13: one method attaches either loss, which it is given as a partial."""
    loss = load_balancing_loss_func
    if "routing_map" in loss.keywords:  # the one in use in 0.12
        loss = functools.partial(loss, routing_map=loss.keywords["routing_map"] & rows.real)

    def scaled(**kwargs: Any) -> Any:
        group = kwargs.get("sequence_partition_group")
        out = loss(**kwargs)
        return out * rows.scale(rows.total(group), 1 if group is None else group.size())

    names = _scaled_by_tokens(router, original, rows)
    return with_globals(original, names)(router, activation, scaled)


@_masked
def _load_balancing_of_0_12(rows: Any, original: Any, router: Any, logits: Any) -> Any:
    """0.12 counts the choices in use, before capacity drops any, inside its top-k function."""
    from replay_patch.replay import padding_rows

    topk = _names(original)["topk_softmax_with_capacity"]

    def of_real_rows(*args: Any, **kwargs: Any) -> Any:
        with padding_rows.SumOfRows(rows):
            return topk(*args, **kwargs)

    return with_globals(original, {"topk_softmax_with_capacity": of_real_rows})(router, logits)


def _scaled_by_tokens(router: Any, original: Any, rows: Any) -> dict[str, Any]:
    """With a loss per token the release multiplies by the number of all rows, not of real ones."""
    if not router.calculate_per_token_loss:
        return {}
    scaler = _names(original)["MoEAuxLossAutoScaler"]

    def apply(activation: Any, loss: Any) -> Any:
        return scaler.apply(activation, loss * (rows.count / rows.number))

    return {"MoEAuxLossAutoScaler": SimpleNamespace(apply=apply)}


def _names(function: Any) -> dict[str, Any]:
    inner: Any = inspect.unwrap(function)
    names: dict[str, Any] = inner.__globals__
    return names


PATCH = Patch(
    name="padding_mask",
    library="megatron",
    targets=(
        f"{_MODEL}.forward",
        f"{_MODEL}.build_schedule_plan",
        f"{_ROUTER}.forward",
        f"{_ROUTER}.apply_z_loss",
        *(f"{_ROUTER}.{name}" for name in _LOSSES),
        f"{_ROUTER}.attach_and_log_load_balancing_loss",
        f"{_ROUTER}.apply_load_balancing_loss",
        f"{_ROUTER}.{_SCORES}",
        f"{_ROUTER}.aux_loss_load_balancing",
    ),
    requires=_MODULE,
    after=("router_objects",),
    relies_on=tuple(  # what it runs on the rows that are no padding
        f"megatron.core.transformer.moe.moe_utils:{name}"
        for name in (
            *("z_loss_func", "switch_load_balancing_loss_func"),
            *("sequence_load_balancing_loss_func", _SCORES),
        )
    ),
    checks=("padding-mask", "padding-model", "padding-counts", "padding-tp-sp", "padding-pp"),
    why=(
        "Before 0.16 padding counts: in the expert bias, the z-loss and the auxiliary losses, "
        "which then balance experts for tokens that are none."
    ),
    how=(
        "GPTModel and TopKRouter take `padding_mask`. The mask goes from the model's call to its "
        "routers, also those of a recompute, through `replay_patch.replay.mask_tracker`; no layer "
        "between them is touched. With a mask the release's own loss code runs on scores and maps "
        "whose rows of padding are zero, and its result is scaled to the number of real rows; "
        "z-loss runs on the real rows; what the expert bias counts is summed again. Without one, "
        "each is the original."
    ),
    upstream="Megatron-LM 0.16.0 takes it",
    remove_when="0.15 is no longer supported",
    needed=_needed,
    apply=_apply,
)
