"""Without this patch code that asks a router of 0.12 or 0.13 for its auxiliary loss, as the routers
of 0.14 can be asked, raises AttributeError in training."""

from typing import Any

from replay_patch.patching import Patch, Transaction, probe

_MODULE = "megatron.core.transformer.moe.router"
_ROUTER = f"{_MODULE}:TopKRouter"


def get_aux_loss_coeff(self: Any, aux_loss_type: str) -> float:
    """The coefficient of "aux_loss", "seq_aux_loss" or "global_aux_loss"; 0.0 if it is not used."""
    kinds = self.routing_type
    coefficients = self.config.moe_aux_loss_coeff
    if not isinstance(kinds, (list, tuple)):
        kinds = [kinds]
    if not isinstance(coefficients, (list, tuple)):
        coefficients = [coefficients] * len(kinds)
    return float(dict(zip(kinds, coefficients, strict=True)).get(aux_loss_type) or 0.0)


def is_aux_loss_enabled(self: Any) -> bool:
    """Whether this router adds any auxiliary load-balancing loss."""
    kinds = ("aux_loss", "seq_aux_loss", "global_aux_loss")
    return any(self.get_aux_loss_coeff(kind) > 0 for kind in kinds)


_METHODS = (get_aux_loss_coeff, is_aux_loss_enabled)


def _missing() -> list[Any]:
    return [m for m in _METHODS if probe.find(f"{_ROUTER}.{m.__name__}") is None]


def _needed() -> tuple[bool, str]:
    missing = [m.__name__ for m in _missing()]
    return bool(missing), f"TopKRouter lacks {', '.join(missing) or 'neither method'}"


def _apply(transaction: Transaction) -> None:
    router = probe.find(_ROUTER)
    for method in _missing():
        transaction.set(router, method.__name__, method)


PATCH = Patch(
    name="aux_loss_methods",
    library="megatron",
    targets=tuple(f"{_ROUTER}.{m.__name__}" for m in _METHODS),
    requires=_MODULE,
    checks=("aux-loss-method",),
    why=(
        "Code written for 0.14 and later asks the router whether it has an auxiliary loss; 0.12 "
        "and 0.13 raise AttributeError, and only in training."
    ),
    how=(
        "Plain functions on the class, bound at access: an attribute on each router would be a "
        "reference cycle and break pickling. They read the release's own settings: one name and "
        "one number, or later lists of both. The release's own loss code is not touched."
    ),
    upstream="https://github.com/volcengine/verl/pull/5298",
    remove_when="0.13 is no longer supported",
    needed=_needed,
    apply=_apply,
)
