"""`replay-patch doctor`: what is installed here, what the plugin did about it, and what is wrong.
It does in its own process what a training job does: import torch, then Megatron."""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from replay_patch import __version__
from replay_patch.drift import comparison, examination
from replay_patch.patching import activation
from replay_patch.patching.registry import megatron_modules, patches

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_MEANING = {
    "active": "in place",
    "not needed": "this release is right by itself",
    "waiting": "its module has not been imported",
    "skipped": "left out by REPLAY_PATCH_SKIP",
    "failed": "could not be applied; nothing was changed",
    "lost": "other code has replaced it",
    "off": "the plugin is not active in this process",
}


def examine() -> dict[str, Any]:
    """Import torch and Megatron here, if the plugin is asked for, and report.

    Returns `enabled`, `active` (all of the plugin, with every patch decided), `trigger`, `versions`
    (name -> {"version", "path"} or None), `settings`, `patches`, `problems`; `drift`, how this
    Megatron differs from the tested releases (see `drift.comparison.compare`), which by itself
    is no problem, and `drift_problem`, what could not be compared, or None.
    """
    errors = _import_all()
    status = activation.status()
    problems = [*_installation_problems(status.trigger), *status.problems, *errors]
    versions = {name: _version(name) for name in _PACKAGES}
    megatron_drift: dict[str, Any] = {"drift": [], "problem": None}
    if status.enabled and versions["megatron.core"] is not None:
        megatron_drift = examination.examine()
    return {
        "enabled": status.enabled,
        "active": status.active and not problems,
        "trigger": status.trigger,
        "versions": versions,
        "settings": status.to_dict()["settings"],
        "patches": _rows(status),
        "problems": problems if status.enabled else [],
        "drift": megatron_drift["drift"],
        "drift_problem": megatron_drift["problem"],
    }


def examine_patches() -> list[dict[str, Any]]:
    """The `patches` of `examine`, without looking at anything else."""
    _import_all()
    return _rows(activation.status())


def _rows(status: activation.Status) -> list[dict[str, Any]]:
    states = {p.name: {"state": p.state, "reason": p.reason} for p in status.patches}
    off = {"state": "off", "reason": ""}
    return [
        {"name": p.name, **states.get(p.name, off), "targets": list(p.targets)} for p in patches()
    ]


def format_report(report: dict[str, Any]) -> str:
    """The report for somebody who has never seen the project."""
    if not report["enabled"]:
        head = "replay-patch is OFF in this environment. Set REPLAY_PATCH=1 to switch it on."
    elif report["active"]:
        head = f"replay-patch is ACTIVE (activated by {report['trigger']})."
    else:
        head = "replay-patch was asked for and is NOT fully active."
    lines = [head, "", "Installed here:"]
    for name, version in report["versions"].items():
        shown = "not installed" if version is None else f"{version['version']:16}{version['path']}"
        lines.append(f"  {name:16}{shown}")
    if report["enabled"]:
        lines += ["", "Patches (`replay-patch patches` says why each exists):"]
    for patch in report["patches"] if report["enabled"] else []:
        reason = patch["reason"] or _MEANING[patch["state"]]
        lines.append(f"  {patch['name']:22}{patch['state']:12}{reason}")
    settings = report["settings"]
    lines += [
        "",
        f"Settings: skip {', '.join(settings['skip']) or 'nothing'}; strict "
        f"{'on' if settings['strict'] else 'off'}; log {settings['log'] or 'not set'}",
    ]
    if report["drift"]:
        lines += ["", comparison.describe(report["drift"])]
        lines += ["The states above decide; run `replay-patch matrix` before you rely on it."]
    if report["drift_problem"]:
        lines += ["", f"Not compared with the tested releases: {report['drift_problem']}"]
    if report["problems"]:
        lines += ["", "Problems:", *(f"  - {problem}" for problem in report["problems"])]
    return "\n".join(lines)


# --- what is installed ------------------------------------------------------------------------

_PACKAGES = {  # import name -> distribution
    "replay_patch": "replay-patch",
    "torch": "torch",
    "torch_npu": "torch-npu",
    "megatron.core": "megatron-core",
    "mindspeed": "mindspeed",
}


def _version(name: str) -> dict[str, str] | None:
    try:
        spec = importlib.util.find_spec(name)
    except Exception:  # noqa: BLE001 - the parent package may fail in any way
        spec = None
    if spec is None:
        return None
    module = sys.modules.get(name)
    info = sys.modules.get(f"{name}.package_info")
    version = getattr(info, "__version__", None) or getattr(module, "__version__", None)
    if version is None:
        try:
            version = importlib.metadata.version(_PACKAGES[name])
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
    origin = spec.origin or next(iter(spec.submodule_search_locations or []), "?")
    return {"version": str(version), "path": str(Path(origin).parent)}


def _import_all() -> list[str]:
    """Import what a job would, if the plugin is asked for; what is wrong with that, in words."""
    if not activation.status().enabled:
        return []
    errors = [_import(name) for name in ("torch", *megatron_modules())]
    return list(dict.fromkeys(error for error in errors if error is not None))


def _import(name: str) -> str | None:
    """Import a module; the error in words, or None."""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the user must know
        missing = getattr(error, "name", None)
        if missing and name.startswith(f"{missing}."):
            return "Megatron is not installed, or not on the path (PYTHONPATH)"
        if missing == name:
            return f"{name} is not installed"
        package = "Megatron" if name.startswith("megatron.") else name
        text = f"{package} cannot be imported: {type(error).__name__}: {error}"
        return text + (f". Install {missing}" if isinstance(error, ModuleNotFoundError) else "")
    return None


# --- how we are installed ---------------------------------------------------------------------


def _installation_problems(trigger: str | None) -> list[str]:
    """What keeps torch from calling us, if nothing else has activated the plugin."""
    problems = _metadata_problems()
    value = os.environ.get(_AUTOLOAD)
    if trigger is None and value not in (None, "1"):
        problems.append(
            f"{_AUTOLOAD}={value!r} switches off torch's loading of plugins (torch reads only '1' "
            "as on). Unset it, or do as the next line says"
        )
    torch = sys.modules.get("torch")
    if trigger is None and torch is not None and not hasattr(torch, "_import_device_backends"):
        problems.append(
            f"torch {torch.__version__} loads no plugins (2.5 and later do). Do as the next line "
            "says"
        )
    return problems


def _metadata_problems() -> list[str]:
    package = Path(__file__).parent
    distributions = list(importlib.metadata.distributions(name="replay-patch"))
    if not distributions:
        return [f"{package} is on the path without its metadata: install it with pip"]
    first, problems = distributions[0], []
    folder = _metadata_folder(first)
    if not any(p.group == "torch.backends" for p in first.entry_points):
        problems.append(
            f"the replay-patch metadata at {folder} has no entry point (a stale dist-info or "
            "egg-info?), and hides the installed one. Remove it"
        )
    if first.version != __version__:
        problems.append(
            f"the metadata first on the path is of replay-patch {first.version} ({folder}), the "
            f"code is {__version__} ({package}). Remove one of the two"
        )
    folders = dict.fromkeys(map(_metadata_folder, distributions))
    if len(folders) > 1:
        shown = ", ".join(folders)
        problems.append(f"replay-patch is installed more than once: {shown}. Remove all but one")
    return problems


def _metadata_folder(distribution: importlib.metadata.Distribution) -> str:
    return str(getattr(distribution, "_path", "?"))
