"""A padding mask from the model call that it was given to, to each router of that call.

Nothing between the model and its routers takes a mask (0.12 ... 0.15), and a recompute runs long
after the call. So in a model that has ever had a mask, a router asks which call it is running in,
and a recompute finds the call of its forward, by `replay_patch.replay.recompute`. A call lives in
its output's graph and dies with it.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from replay_patch.patching import activation
from replay_patch.patching.patch import ACTIVE
from replay_patch.refusals import Where, refuse, warn_once
from replay_patch.replay import recompute
from replay_patch.replay.padding_rows import Padding
from replay_patch.replay.per_thread import PerThread


class ModelCall:
    """One call of a model, as long as its graph lives: its `padding` (None: it was given no mask),
    and the number of the `backward` pass that it was made in (-1: in none)."""

    __slots__ = ("__weakref__", "backward", "padding")

    def __init__(self, padding: Padding | None) -> None:
        self.padding, self.backward = padding, recompute.backward_pass()


class ModelCalls:
    """The calls of one GPTModel since its first mask. Its routers find them by `calls_by_router`.

    Attributes:
        next_mask: bool [B, S] for the next call, from a session.
        planned_padding: of the call whose schedule plan was built last (combined 1F1B). Its layers
            run outside of the model's forward, and no router in it is recomputed.
    """

    def __init__(self, model: Any) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        self.next_mask: Tensor | None = None
        self.planned_padding: Padding | None = None
        self._at_work: PerThread[ModelCall] = PerThread()
        self._forwards = recompute.Forwards[ModelCall]()  # of calls with a mask
        for module in model.modules():
            if isinstance(module, TopKRouter):
                calls_by_router[id(module)] = self
                weakref.finalize(module, calls_by_router.pop, id(module), None).atexit = False

    def run(self, padding: Padding | None, forward: Callable[[], Any], recomputes: bool) -> Any:
        """Run the model's forward as a call with this padding.
        Raises RouteError if `recomputes` (recompute is configured) and one could not find the call.
        """
        call, span = ModelCall(padding), None
        with self._at_work.during(call):
            if padding is not None and torch.is_grad_enabled():
                if recompute.KNOWS:
                    span = self._forwards.open(call)
                elif recomputes:
                    recompute.refuse_torch("recompute with a padding mask")
            try:
                output = forward()
            finally:
                if span is not None:
                    span.close()
        if span is not None and not recompute.anchor(call, output) and recomputes:
            recompute.refuse_output(f"({type(output).__name__}) of a call with a padding mask")
        return output

    def padding_of(self, router: Any) -> Padding | None:
        """The padding of the router call that begins.
        Raises RouteError if it is a recompute of a call that is not known any more."""
        call, backward = self._at_work.get(), recompute.backward_pass()
        if call is not None and call.backward == backward:
            return call.padding
        if backward == -1:
            return self.planned_padding
        span = self._forwards.find(recompute.current_number())
        if span is None:
            return None  # a call without a mask
        call = span.forward()
        if call is None:
            refuse(
                "a recompute in a model call whose output is gone, and its padding mask too",
                "a loss that is computed from the model's output",
                Where.of(router),
            )
        return call.padding


calls_by_router: dict[int, ModelCalls] = {}
"""id of a router -> the calls of its model. Empty until a mask is used."""

_calls_by_model: "weakref.WeakKeyDictionary[Any, ModelCalls]" = weakref.WeakKeyDictionary()


def calls_of(model: Any) -> ModelCalls:
    """The calls of a model; from now on it is known to have had a mask."""
    if model not in _calls_by_model:
        _calls_by_model[model] = ModelCalls(model)
    return _calls_by_model[model]


def has_had_mask(model: Any) -> bool:
    """Whether a model has had a mask."""
    return model in _calls_by_model


def padding_of(router: Any) -> Padding | None:
    """The padding of the router call that begins; None: all rows count.
    Raises RouteError if it is a recompute of a call that is not known any more."""
    calls = calls_by_router.get(id(router))
    return None if calls is None else calls.padding_of(router)


# --- masks of sessions --------------------------------------------------------------------------


def set_next_mask(models: list[Any], mask: Tensor | None) -> None:
    """Keep a mask, bool [B, S] as the models take it, for the next call of these models (of
    `models_with_masks`), which are given none themselves. None: forget the last one."""
    for model in models:
        if mask is not None or has_had_mask(model):
            calls_of(model).next_mask = mask


def models_with_masks(chunk: Any) -> list[Any]:
    """The models in a chunk that take a mask, by our patch."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    states = {patch.name: patch.state for patch in activation.status().patches}
    if states.get("padding_mask") != ACTIVE:
        return []
    if isinstance(chunk, GPTModel):
        return [chunk]
    return [module for module in chunk.modules() if isinstance(module, GPTModel)]


def warn_of_padding(chunk: Any, mask: Tensor, why: str) -> None:
    """Say once that padding counts in a model, if its config counts anything, and `why` its routers
    get no mask. `mask`: bool [B, S], on the host."""
    config = chunk.config
    aux = config.moe_aux_loss_coeff
    counts = [config.moe_z_loss_coeff, config.moe_router_enable_expert_bias]
    counts += aux if isinstance(aux, (list, tuple)) else [aux]
    if chunk.training and any(counts) and bool(mask.any()):
        name = type(chunk).__name__
        warn_once("%s %s: padding counts in its router losses and expert bias", name, why)
