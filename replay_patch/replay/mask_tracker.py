"""A padding mask from the model call that it was given to, to each router of that call.

Nothing between the model and its routers takes a mask (0.12 ... 0.15), and a recompute runs
long after the call. So each call of a model that has ever had a mask is a range of autograd
sequence numbers, as in `replay_patch.replay.recompute`: a router asks which call it is running in,
and a recompute finds the call of its forward. A call lives in its output's graph and dies with it.
"""

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from replay_patch.patching import activation
from replay_patch.patching.patch import ACTIVE
from replay_patch.refusals import refuse, warn_once
from replay_patch.replay import recompute
from replay_patch.replay.padding_rows import Padding

carriers: dict[int, "Carrier"] = {}
"""id of a router -> what knows the calls of its model. Empty until a mask is used."""

_models: "weakref.WeakKeyDictionary[Any, Carrier]" = weakref.WeakKeyDictionary()


_REMEMBERED = 256
"""Of how many finished calls of a model the range is kept, to refuse what should find them."""


class Call:
    """One call of a model, as long as its graph lives.

    Attributes:
        padding: None: it was given no mask.
        task: the backward pass that it was made in, -1 for none.
    """

    __slots__ = ("__weakref__", "padding", "task")

    def __init__(self, padding: Padding | None) -> None:
        self.padding, self.task = padding, recompute.graph_task()


class _Range(recompute.Span):
    """That of a call with a mask, which begins now."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.start, self.call = recompute.next_number(), weakref.ref(call)


class Carrier:
    """The calls of one model since its first mask.

    Attributes:
        held: a mask for the next call, from a session.
        planned: of the call whose schedule plan was built last (combined 1F1B). Its layers run
            outside of the model's forward, and no router in it is recomputed.
    """

    def __init__(self, model: Any) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        self.held: Any = None
        self.planned: Padding | None = None
        self._running: dict[int, Call] = {}  # by thread
        self._ranges: list[_Range] = []
        for module in model.modules():
            if isinstance(module, TopKRouter):
                carriers[id(module)] = self
                weakref.finalize(module, carriers.pop, id(module), None).atexit = False

    def run(self, padding: Padding | None, call: Callable[[], Any], recomputes: bool) -> Any:
        """Run the model's forward.

        Args:
            recomputes: recompute is configured: a call that it could not find again is an error.
        """
        thread = threading.get_ident()
        outer = self._running.get(thread)
        self._running[thread] = now = Call(padding)
        opened = self._open(now, recomputes) if padding and torch.is_grad_enabled() else None
        try:
            output = call()
        finally:
            if outer is None:
                del self._running[thread]
            else:
                self._running[thread] = outer
            if opened is not None:
                opened.end = recompute.next_number()
        if opened is not None and not recompute.anchor(now, output) and recomputes:
            recompute.refuse_output(f"({type(output).__name__}) of a call with a padding mask")
        return output

    def _open(self, now: Call, recomputes: bool) -> _Range | None:
        if not recompute.KNOWS:
            if recomputes:
                recompute.refuse_torch("recompute with a padding mask")
            return None
        done = [r for r in self._ranges[:-_REMEMBERED] if r.call() is not None]
        opened = _Range(now)
        self._ranges = [*done, *self._ranges[-_REMEMBERED:], opened]
        return opened

    def find(self, router: Any) -> Padding | None:
        """The padding of the router call that begins.

        Raises:
            RouteError: it is a recompute of a call that is not known any more.
        """
        now, task = self._running.get(threading.get_ident()), recompute.graph_task()
        if now is not None and now.task == task:
            return now.padding
        if task == -1:
            return self.planned
        number = recompute.current_number()
        for one in reversed(self._ranges):
            if one.holds(number):
                call = one.call()
                if call is not None:
                    return call.padding
                refuse(
                    "a recompute in a model call whose output is gone, and its padding mask too",
                    "a loss that is computed from the model's output",
                    SimpleNamespace(layer_number=router.layer_number, mtp_depth=0),
                )
        return None  # a call without a mask


def carrier_of(model: Any) -> Carrier:
    """The one of a model, made with its first mask."""
    if model not in _models:
        _models[model] = Carrier(model)
    return _models[model]


def find(router: Any) -> Padding | None:
    """The padding of the router call that begins; None: all rows count."""
    carrier = carriers.get(id(router))
    return None if carrier is None else carrier.find(router)


def known(model: Any) -> bool:
    """Whether a model has had a mask."""
    return model in _models


# --- masks of sessions --------------------------------------------------------------------------


def hold(models: list[Any], mask: Any) -> None:
    """Keep a mask for the next call of these models, which are given none themselves.

    Args:
        mask: bool [B, S], as the models take it; None: forget the last one.
    """
    for model in models:
        if mask is not None or known(model):
            carrier_of(model).held = mask


def takers(chunk: Any) -> list[Any]:
    """The models in `chunk` that take a mask, by our patch."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    states = {patch.name: patch.state for patch in activation.status().patches}
    if states.get("padding_mask") != ACTIVE:
        return []
    if isinstance(chunk, GPTModel):
        return [chunk]
    return [module for module in chunk.modules() if isinstance(module, GPTModel)]


def warn_of_padding(chunk: Any, mask: Any, why: str) -> None:
    """Say once that padding counts in a model, if anything counts there.

    Args:
        mask: bool [B, S], on the host.
        why: its routers get no mask.
    """
    config = chunk.config
    aux = config.moe_aux_loss_coeff
    counts = [config.moe_z_loss_coeff, config.moe_router_enable_expert_bias]
    counts += aux if isinstance(aux, (list, tuple)) else [aux]
    if chunk.training and any(counts) and bool(mask.any()):
        name = type(chunk).__name__
        warn_once("%s %s: padding counts in its router losses and expert bias", name, why)
