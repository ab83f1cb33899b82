"""For tests/matrix/test_checks_can_fail.py."""

import importlib


def states() -> dict[str, str]:
    """Of all patches, once what they wait for is imported."""
    import replay_patch
    from replay_patch.patching.registry import megatron_modules

    for module in megatron_modules():
        importlib.import_module(module)
    return {patch.name: patch.state for patch in replay_patch.status().patches}
