"""For tests/unit/patching/test_activation.py: activation without Megatron."""

import sys
from typing import Any


def loaded(*packages: str) -> list[str]:
    """The modules of these packages that `import torch` loads."""
    import torch

    return _modules(*packages)


def new_finders() -> list[str]:
    """What `import torch` adds to `sys.meta_path` that is not torch's."""
    before = list(sys.meta_path)
    import torch

    return [
        repr(finder)
        for finder in sys.meta_path
        if finder not in before
        and "torch" not in type(finder).__module__ + getattr(finder, "__module__", "")
    ]


def status(first: str = "") -> list[Any]:
    """[enabled, active, trigger] after `import torch`; `first`: "auto" or "activate"."""
    if first == "auto":
        import replay_patch.auto
    elif first == "activate":
        import replay_patch

        replay_patch.activate()
    import torch

    import replay_patch

    found = replay_patch.status()
    return [found.enabled, found.active, found.trigger]


def loaded_by_auto() -> list[str]:
    import replay_patch.auto

    return _modules("megatron", "torch")


def deactivated() -> list[Any]:
    before = list(sys.meta_path)
    import replay_patch

    replay_patch.activate()
    replay_patch.deactivate()
    found = replay_patch.deactivate()
    left = [type(finder).__name__ for finder in sys.meta_path if finder not in before]
    return [found.active, found.trigger, found.problems, left]


def refusals() -> list[Any]:
    """What is logged by `import torch`, the problems, and the errors of two uses."""
    log = _log()
    import torch

    import replay_patch
    from replay_patch.patching import activation

    answer = [log.getvalue(), list(replay_patch.status().problems)]
    for use in (replay_patch.activate, lambda: activation.require_replay("replay")):
        try:
            use()
        except replay_patch.ReplayPatchError as error:
            answer.append(f"{type(error).__name__}: {error}")
    return answer


def settings_error() -> str:
    import replay_patch

    try:
        replay_patch.activate()
    except replay_patch.SettingsError as error:
        return str(error)
    return "no error"


def torch_after_a_failure() -> list[Any]:
    log = _log()
    import torch

    import replay_patch

    return [torch.ones(1).item(), log.getvalue(), list(replay_patch.status().problems)]


def loaded_by_the_package() -> list[str]:
    """Heavy modules, and any of ours, that `import replay_patch` loads."""
    import replay_patch

    hasattr(replay_patch, "topk_softmax_with_capacity")
    heavy = _modules("torch", "numpy", "wrapt", "megatron")
    return heavy + [name for name in sys.modules if name.startswith("replay_patch.")]


def problems() -> list[Any]:
    import torch

    import replay_patch

    found = replay_patch.status()
    return [found.enabled, found.active, list(found.problems)]


def _modules(*packages: str) -> list[str]:
    return sorted(name for name in sys.modules if name.split(".")[0] in packages)


def _log() -> Any:
    import io
    import logging

    stream = io.StringIO()
    logging.basicConfig(stream=stream)
    return stream
