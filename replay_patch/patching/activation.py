"""`activate()`, `deactivate()`, `status()`, and the one ledger of this process.

Activation registers import hooks on the modules that define what the patches change, patches what
is already imported, and imports nothing of Megatron itself.
"""

import dataclasses
import functools
import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replay_patch import settings as _settings
from replay_patch.errors import PatchNotActive, SettingsError
from replay_patch.patching import registry
from replay_patch.patching.import_hooks import when_imported
from replay_patch.patching.ledger import Ledger
from replay_patch.patching.patch import FAILED, LOST, SKIPPED, PatchState
from replay_patch.refusals import installed_megatron
from replay_patch.settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """What the plugin is and does in this process.

    Attributes:
        enabled: replay was asked for, by `REPLAY_PATCH` or by `activate()`.
        active: the plugin is at work and no patch is failed, lost or skipped.
        trigger: what activated it first: "torch.backends", "replay_patch.auto",
            "replay-patch run", "activate()", or None.
        settings: those in force.
        patches: one state per patch.
        problems: what is wrong, in words; empty if nothing is.
    """

    enabled: bool
    active: bool
    trigger: str | None
    settings: Settings
    patches: tuple[PatchState, ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        out = dataclasses.asdict(self)
        out["settings"]["skip"] = sorted(self.settings.skip)
        return out


@dataclass
class _Activation:
    ledger: Ledger
    settings: Settings
    trigger: str


_lock = threading.RLock()
_activation: _Activation | None = None
_hooked_modules: set[str] = set()
_not_restored: tuple[str, ...] | None = None  # places that deactivate() left; None: never called
_load_error: str | None = None


def activate(strict: bool | None = None) -> Status:
    """Activate the plugin, whatever `REPLAY_PATCH` says.

    Called again, it puts back what other code has overwritten since, and nothing else.

    Args:
        strict: as `REPLAY_PATCH_STRICT`, which it overrides if given.
    Raises:
        SettingsError: a `REPLAY_PATCH*` variable is not understood.
        PatchNotActive: a patch of an already imported module failed.
    """
    asked = _settings.read()
    asked = dataclasses.replace(
        asked, enabled=True, strict=asked.strict if strict is None else strict
    )
    if asked.problems:
        raise SettingsError("; ".join(asked.problems))
    with _lock:
        if _activation is not None and strict is not None:
            _activation.settings = dataclasses.replace(_activation.settings, strict=strict)
        _start(asked, "activate()")
    current = status()
    if current.settings.problems:
        raise SettingsError("; ".join(current.settings.problems))
    failed = [f"{p.name}: {p.reason}" for p in current.patches if p.state == FAILED]
    if failed:
        raise PatchNotActive(_advise("the plugin is not fully active", failed))
    return current


def autoload(trigger: str) -> None:
    """What `replay_patch.autoload.load` does once `REPLAY_PATCH` is not off: record, never raise
    for what is wrong with the installation."""
    asked = _settings.read()
    for problem in asked.problems:
        _log.warning("replay-patch: %s; using replay will be an error", problem)
    global _load_error
    try:
        _start(asked, trigger)
    except Exception as error:
        _load_error = f"{type(error).__name__}: {error}"
        raise


def deactivate() -> Status:
    """Give back every original object that is still ours to give back. What is not (somebody
    wrapped our wrapper) stays as it is and is named in `problems`."""
    global _activation, _not_restored
    with _lock:
        if _activation is not None:
            _not_restored = tuple(_activation.ledger.undo())
            _activation = None
    return status()


def status() -> Status:
    """What triggered activation, and the verified state of each patch."""
    activation = _activation  # another thread may deactivate
    asked = activation.settings if activation is not None else _settings.read()
    patches = activation.ledger.states() if activation is not None else ()
    problems = [*asked.problems]
    problems += [
        f"patch {p.name} is {p.state}: {p.reason}"
        for p in patches
        if p.state in (FAILED, LOST, SKIPPED)
    ]
    if activation is None:
        problems += [f"could not be restored: {where}" for where in _not_restored or ()]
        if asked.enabled and _not_restored is None and "torch" in sys.modules:
            problems.append(
                "replay was asked for (REPLAY_PATCH), torch is imported, and nothing has activated "
                "the plugin: torch's loading of plugins was off at that moment (importing "
                "torch_npu first does that, too). Start the job with `replay-patch run -- ...`, or "
                "import replay_patch.auto at the top of the script"
            )
    if _load_error is not None:
        problems.append(f"activation failed: {_load_error}")
    return Status(
        enabled=asked.enabled,
        active=activation is not None and not problems,
        trigger=None if activation is None else activation.trigger,
        settings=asked,
        patches=patches,
        problems=tuple(problems),
    )


def strict() -> bool:
    """Whether what is usually a warning is an error in this process."""
    activation = _activation
    return activation is not None and activation.settings.strict


def require_replay(feature: str) -> None:
    """Refuse `feature` unless every patch that replay stands on is in place, or can still be.

    With `REPLAY_PATCH_STRICT` any other failed or lost patch is a reason to refuse, too.
    Raises PatchNotActive, which says which patch, why, and what to do.
    """
    current, vital = status(), registry.vital_names()
    wrong = [*current.settings.problems]
    if _load_error is not None:
        wrong.append(f"activation failed: {_load_error}")
    if current.trigger is None:
        wrong.append("replay-patch is not active in this process")
    for patch in current.patches:
        missing = patch.name in vital and patch.state in (FAILED, LOST, SKIPPED)
        broken = current.settings.strict and patch.state in (FAILED, LOST)
        if missing or broken:
            wrong.append(f"patch {patch.name} is {patch.state}: {patch.reason}")
    if wrong:
        raise PatchNotActive(_advise(f"{feature} is refused", wrong))


def _advise(what: str, wrong: list[str]) -> str:
    release = "no plugin" if _activation is None else installed_megatron()
    return f"{what} on {release}: {'; '.join(wrong)}. `replay-patch doctor` says more."


def reinstall() -> None:
    """Put back what other code has overwritten, and decide again what was not needed.
    A module that is not imported gets one hook, however often the plugin is activated."""
    for module in dict.fromkeys(module for p in registry.patches() for module in p.modules):
        if module in sys.modules or module not in _hooked_modules:
            _hooked_modules.add(module)
            when_imported(module, functools.partial(_apply_patches_of, module))


def uncover(functions: Sequence[Any]) -> None:
    """See `Ledger.uncover`; `reinstall` afterwards."""
    activation = _activation
    if activation is not None:
        activation.ledger.uncover(functions)


def _start(asked: Settings, trigger: str) -> None:
    """Make the ledger and hook every module that a patch waits for."""
    global _activation
    with _lock:
        if _activation is not None:
            reinstall()
            return
        unknown = asked.skip - {p.name for p in registry.patches()}
        if unknown:
            known = ", ".join(p.name for p in registry.patches())
            problem = f"REPLAY_PATCH_SKIP names {', '.join(sorted(unknown))}; known: {known}"
            _log.warning("replay-patch: %s; using replay will be an error", problem)
            asked = dataclasses.replace(asked, problems=(*asked.problems, problem))
        _log_to_stderr(asked.log)
        _activation = _Activation(Ledger(registry.patches(), asked), asked, trigger)
    reinstall()
    if os.environ.get("RANK", "0") == "0":
        _log.info("replay-patch is active (%s); %d patches", trigger, len(registry.patches()))


def _apply_patches_of(module: str) -> None:
    activation = _activation
    if activation is None:  # deactivated since the hook was registered
        return
    for patch in registry.patches():
        if module in patch.modules:
            activation.ledger.apply_if_needed(patch.name)


def _log_to_stderr(level: str | None) -> None:
    logger = logging.getLogger("replay_patch")
    if level is not None and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level)
