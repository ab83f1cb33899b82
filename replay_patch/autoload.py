"""What the entry points call. Standard library only; idempotent; never raises.

torch (>= 2.5) calls `load` near the end of `import torch`, in every process: an exception here
would make `import torch` fail for the whole job, and torch itself is not complete yet. So this
looks at one environment variable and returns, or registers import hooks and returns; what goes
wrong is kept for `replay_patch.status()` and raised where replay is used.
"""

import logging
import os

from replay_patch import OFF

_log = logging.getLogger(__name__)


def load(trigger: str = "torch.backends") -> None:
    """Activate the plugin if `REPLAY_PATCH` asks for it. `trigger` says what called, for
    `replay_patch.status()` and `replay-patch doctor`."""
    if os.environ.get("REPLAY_PATCH", "").strip().lower() in OFF:
        return
    try:
        from replay_patch.patching import activation

        activation.autoload(trigger)
    except Exception:  # noqa: BLE001 - see the module docstring
        _log.exception("replay-patch could not be activated by %s; replay will not work", trigger)
