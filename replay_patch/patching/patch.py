"""`Patch`: one correction of an installed library, and what may become of it."""

from collections.abc import Callable
from dataclasses import dataclass

from replay_patch.patching.probe import Probe
from replay_patch.patching.transaction import Transaction

ACTIVE = "active"
NOT_NEEDED = "not needed"
WAITING = "waiting"
SKIPPED = "skipped"
FAILED = "failed"
LOST = "lost"

OPTIONAL = frozenset({"mindspeed", "skyrl", "verl"})
"""Libraries that a job may do without: their patches are not needed until they are imported."""


@dataclass(frozen=True)
class Patch:
    """One correction of an installed library, with the reasons a maintainer needs to keep it."""

    name: str
    targets: tuple[str, ...]
    """What is changed, as `module:qualname`; a release may lack some of them."""
    modules: tuple[str, ...]
    """Defining modules: when one of them is completely imported, the patch is tried."""
    why: str
    how: str
    upstream: str
    """A link to the upstream change or report, or "none"."""
    remove_when: str
    needed: Callable[[Probe], tuple[bool, str]]
    """Whether the live objects need it, and what was found, in words."""
    apply: Callable[[Transaction], None]
    vital: bool = False
    """Without it a replay would be wrong or ignored."""
    arm: Callable[[Transaction], None] | None = None
    """What has to be in place before any of `modules` is imported."""

    working: Callable[[Probe], bool] | None = None
    """Whether it still works where other code is around ours; None: it does."""

    @property
    def library(self) -> str:
        """What is patched: "megatron", or one of `OPTIONAL`."""
        return self.modules[-1].partition(".")[0]


@dataclass(frozen=True)
class PatchState:
    """One row of the ledger. `state` is one of the constants above; `reason` is for people."""

    name: str
    state: str
    reason: str
    targets: tuple[str, ...]
