"""The mean loss of a microbatch without tokens is zero, and no error.

This line is what `docs/patches.md` shows of the patch, so it says what holds with it. The file is
a template: copy it to `patches/<library>/<name>.py`, and replace what is made up here (a library
`acme` whose `acme.losses.mean_loss` divides by the number of tokens). `docs/writing-a-patch.md`
goes through it step by step, and a test applies it.
"""

import sys
from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, Transaction, probe

# Only strings: importing this file must import nothing of the library.
_MODULE = "acme.losses"
_TARGET = f"{_MODULE}:mean_loss"


def _needed() -> tuple[bool, str]:
    """Ask the object that is really there, by a tiny call where that is possible.

    The sentence is shown by `replay-patch doctor`, whatever the answer is.
    """
    mean_loss = probe.find(_TARGET)
    if mean_loss is None:
        return False, "this release has no mean_loss()"
    try:
        mean_loss(0.0, num_tokens=0)
    except ZeroDivisionError:
        return True, "mean_loss() divides by zero tokens"
    return False, "mean_loss() takes zero tokens"


def _apply(transaction: Transaction) -> None:
    """Change things through the transaction only: it is what takes them back.

    Raise LookupError for what is not as expected. The patch is then "failed", with that text, and
    nothing stays half-changed.
    """
    if "num_tokens" not in probe.parameters(_TARGET):
        raise LookupError("mean_loss() has no num_tokens, by which empty microbatches are known")
    # Importers bind functions by value; this sets the name wherever it still is the original. For
    # a method it would be `transaction.wrap(probe.find("acme.losses:Loss"), "mean", ...)`.
    transaction.wrap_everywhere(sys.modules[_MODULE], "mean_loss", _with_empty_microbatches)


def _with_empty_microbatches(mean_loss: Callable[..., Any]) -> Callable[..., Any]:
    """`mean_loss` for microbatches that may be empty."""

    def mean_loss_or_zero(total: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        # Arguments that a later release may add are handed on, and all other calls are its own.
        return mean_loss(total, max(num_tokens, 1), *args, **kwargs)

    return mean_loss_or_zero


PATCH = Patch(
    # Its file's name, which users type into REPLAY_PATCH_SKIP: unique over all libraries.
    name="patch_template",
    # Its folder's name.
    library="acme",
    # What it changes.
    targets=(_TARGET,),
    # It is tried when one of these is completely imported: the modules that define the targets.
    modules=(_MODULE,),
    # The module that must be there. For Megatron: one of `modules` that every release has.
    requires=_MODULE,
    # Names of patches that have to come first.
    after=(),
    # What it calls or reads and does not change. The drift report watches it in new releases.
    relies_on=(),
    # Checks of `replay-patch matrix` that fail without it; a patch of Megatron's names one.
    checks=(),
    # Whether a replay would be wrong or ignored without it. It is then refused.
    vital=False,
    why=(
        "A schedule that fills up with empty microbatches meets a ZeroDivisionError in the last "
        "of them, after all the others have been computed."
    ),
    how=(
        "A wrapper, set wherever the function is bound, that divides by 1 in the place of 0. The "
        "total of no tokens is zero, so the mean is, too; all other calls are unchanged."
    ),
    # A link to the change or report; or "none: " and why there is none.
    upstream="none: the library is made up",
    remove_when="no supported release divides by zero",
    needed=_needed,
    apply=_apply,
)
