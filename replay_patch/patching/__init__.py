"""What a patch file needs; see `docs/writing-a-patch.md`."""

from replay_patch.patching import probe
from replay_patch.patching.patch import REPLAYING, Patch
from replay_patch.patching.transaction import Transaction, wrappers_at

__all__ = ["REPLAYING", "Patch", "Transaction", "probe", "wrappers_at"]
