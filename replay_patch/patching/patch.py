"""`Patch`: one correction of an installed library, and what may become of it."""

from collections.abc import Callable
from dataclasses import dataclass

from replay_patch.patching.transaction import Transaction

ACTIVE = "active"
NOT_NEEDED = "not needed"
WAITING = "waiting"
SKIPPED = "skipped"
FAILED = "failed"
LOST = "lost"

REPLAYING = "replaying"
"""In `Patch.checks`: every check that records or replays. Vital patches need not say it."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One correction of an installed library, with all that anybody needs to know about it."""

    name: str
    """As users type it into `REPLAY_PATCH_SKIP`; also the name of its file."""
    library: str
    """What is patched; also the folder of its file."""
    targets: tuple[str, ...]
    """What is changed, as `module:qualname`; a release may lack some of them."""
    requires: str
    """The module that must be there. Of Megatron: one of `modules` that every release has."""
    modules: tuple[str, ...] = ()
    """Defining modules: the patch is tried when one is completely imported. Empty: `requires`."""
    why: str
    """What goes wrong without it."""
    how: str
    upstream: str
    """A link to the upstream change or report, or "none" and the reason."""
    remove_when: str
    needed: Callable[[], tuple[bool, str]]
    """Whether the live objects need it, and what was found, in words; see `probe`."""
    apply: Callable[[Transaction], None]
    after: tuple[str, ...] = ()
    """Names of patches that come first."""
    relies_on: tuple[str, ...] = ()
    """What it calls or reads and does not change, as `module:qualname`; `module:` is the list of
    its classes. The drift report watches it, beside the targets."""
    checks: tuple[str, ...] = ()
    """Names of the checks of `replay-patch matrix` that fail without it where it is needed."""
    vital: bool = False
    """Replay relies on it: without it a replay would be wrong or ignored."""
    before_import: Callable[[Transaction], None] | None = None
    """What has to be in place before any of `modules` is imported."""
    still_works: Callable[[], bool] | None = None
    """Whether it still works where other code is around ours; None: it does."""

    def __post_init__(self) -> None:
        if not self.modules:
            object.__setattr__(self, "modules", (self.requires,))

    @property
    def optional(self) -> bool:
        """Whether a job may do without the library: until it is imported, nothing is needed."""
        return self.requires.partition(".")[0] != "megatron"


@dataclass(frozen=True)
class PatchState:
    """One row of the ledger. `state` is one of the constants above; `reason` is for people."""

    name: str
    state: str
    reason: str
    targets: tuple[str, ...]
