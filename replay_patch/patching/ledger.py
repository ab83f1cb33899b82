"""`Ledger`: the state of each patch in this process."""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from replay_patch.patching.import_hooks import complete
from replay_patch.patching.patch import (
    ACTIVE,
    FAILED,
    LOST,
    NOT_NEEDED,
    SKIPPED,
    WAITING,
    Patch,
    PatchState,
)
from replay_patch.patching.transaction import Transaction
from replay_patch.refusals import installed_megatron
from replay_patch.settings import Settings

_log = logging.getLogger(__name__)


class Ledger:
    """The patches of one activation. Safe to call from several threads; never raises."""

    def __init__(self, patches: tuple[Patch, ...], settings: Settings) -> None:
        self._lock = threading.RLock()  # an apply may import a module whose hook comes back here
        self._patches = {p.name: p for p in patches}
        if len(self._patches) != len(patches):
            raise ValueError(f"two patches have one name: {sorted(p.name for p in patches)}")
        self._skip = settings.skip
        self._undecided = set(self._patches)  # never tried
        self._states = {
            name: (
                NOT_NEEDED if patch.optional else WAITING,
                f"{' or '.join(patch.modules)} is not imported",
            )
            for name, patch in self._patches.items()
        }
        self._transactions = {name: Transaction() for name in self._patches}
        for name, patch in self._patches.items():
            if patch.before_import is not None and name not in self._skip:
                patch.before_import(self._transactions[name])
        # What is in place before the import stays when a patch fails or is applied again.
        self._early_changes = {name: len(t.changes) for name, t in self._transactions.items()}

    def apply_if_needed(self, name: str) -> None:
        """Apply a patch if it is needed and neither in place nor skipped; whole or not at all.
        One that other code has overwritten is taken back and applied again, on top of that code."""
        with self._lock:
            patch, transaction = self._patches[name], self._transactions[name]
            self._undecided.discard(name)
            again = ""
            if self._states[name][0] == ACTIVE:
                lost = transaction.lost()
                if lost:
                    again = f"; reinstalled, because other code had replaced {', '.join(lost)}"
                elif patch.still_works is None or patch.still_works():
                    return
                else:
                    again = "; reinstalled, because other code around it answered for it"
                transaction.prepare_to_apply_again(self._early_changes[name])
            before = len(transaction.changes)
            try:
                needed, reason = patch.needed()
                if not needed:
                    self._states[name] = NOT_NEEDED, reason
                elif name in self._skip:
                    self._states[name] = SKIPPED, f"named in REPLAY_PATCH_SKIP ({reason})"
                else:
                    patch.apply(transaction)
                    self._states[name] = ACTIVE, reason + again
            except Exception as error:  # noqa: BLE001 - an import hook must not raise
                transaction.undo(before)
                reason = f"{type(error).__name__}: {error}"
                self._states[name] = FAILED, reason
                _log.warning("patch %s failed on %s: %s", name, installed_megatron(), reason)
                _log.debug("patch %s failed here", name, exc_info=True)
            else:
                _log.debug("patch %s: %s (%s)", name, *self._states[name])

    def uncover(self, functions: Sequence[Any]) -> None:
        """Take back what is directly around these functions of other code, so it finds its own."""
        with self._lock:
            for name in reversed(self._patches):
                self._transactions[name].uncover(functions)

    def states(self) -> tuple[PatchState, ...]:
        """The state of every patch now; an active one is verified first. One that was not tried
        though its module is there (another hook of that module failed, and wrapt then forgot them
        all) is tried now."""
        with self._lock:
            for name, patch in self._patches.items():
                if name in self._undecided and any(map(complete, patch.modules)):
                    self.apply_if_needed(name)
            return tuple(
                PatchState(name, *self._verified(name), self._patches[name].targets)
                for name in self._patches
            )

    def _verified(self, name: str) -> tuple[str, str]:
        state, reason = self._states[name]
        lost = self._transactions[name].lost() if state == ACTIVE else []
        return (LOST, f"replaced by other code: {', '.join(lost)}") if lost else (state, reason)

    def undo(self) -> list[str]:
        """Take back all patches, last first; returns the places that are no longer ours."""
        with self._lock:
            kept: list[str] = []
            for name in reversed(self._patches):
                kept += self._transactions[name].undo()
            return kept
