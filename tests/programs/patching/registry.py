"""For tests/unit/patching/test_registry.py."""

from pathlib import Path


def new_patch(name: str) -> dict[str, str]:
    """What becomes of a patch of the module `name` that has the same name."""
    import torch

    import replay_patch
    from replay_patch.patching.registry import patches

    def state() -> str:
        return {patch.name: patch.state for patch in replay_patch.status().patches}[name]

    names = [patch.name for patch in patches()]
    [earlier] = next(patch.after for patch in patches() if patch.name == name)
    answer = {
        "package": str(Path(replay_patch.__file__).parent),
        "found after": earlier if names.index(earlier) < names.index(name) else "nothing",
        "before the import": state(),
    }
    greeting = __import__(name)
    answer |= {"after it": state(), "greeting": greeting.hello()}
    replay_patch.deactivate()
    return answer | {"without the plugin": greeting.hello()}
