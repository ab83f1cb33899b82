"""Activation around a real Megatron: what comes first, what is missing, what fails."""

from importlib.util import find_spec

import megatron.core
import pytest
from helpers import interpreters

from replay_patch.patching.registry import vital_names

pytestmark = pytest.mark.mechanism

REPORT = """
import json, replay_patch
status = replay_patch.status()
print(json.dumps([status.active, status.trigger, sorted({p.state for p in status.patches})]))
"""
ROUTER = "import megatron.core.transformer.moe.router, megatron.core.models.gpt.gpt_model\n"


def test_import_torch_imports_no_megatron() -> None:
    code = """
        import json, sys, torch
        print(json.dumps([m for m in sys.modules if m.split(".")[0] == "megatron"]))
    """

    assert interpreters.run(code, REPLAY_PATCH="1") == []


@pytest.mark.parametrize("first", ["import torch\n", ROUTER], ids=["torch", "megatron"])
def test_torch_or_megatron_first(first: str) -> None:
    triton = "from replay_patch.megatron import no_triton; no_triton.provide()\n"

    active, trigger, states = interpreters.run(triton + first + ROUTER + REPORT, REPLAY_PATCH="1")

    assert (active, trigger) == (True, "torch.backends")
    assert set(states) <= {"active", "not needed"}


def test_megatron_already_imported() -> None:
    code = ROUTER + "import replay_patch; replay_patch.activate()\n" + REPORT

    active, trigger, states = interpreters.run(code, bed=True)

    assert (active, trigger) == (True, "activate()")
    assert set(states) <= {"active", "not needed"}


def test_every_patch_is_decided_once_a_model_class_is_imported() -> None:
    import replay_patch

    assert {p.state for p in replay_patch.status().patches} <= {"active", "not needed"}


def test_deactivation_gives_every_object_back() -> None:
    code = (
        ROUTER
        + """
import json, sys, replay_patch
def state():
    out = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron."):
            out[name] = dict(vars(module))
            for key, value in vars(module).items():
                if isinstance(value, type) and value.__module__ == name:
                    out[name + ":" + key] = dict(vars(value))
    return out
before = state()
replay_patch.activate()
from megatron.core.transformer.moe.router_replay import RouterReplay
changed = [k for k, v in state().items() if v != before.get(k)]
replay_patch.deactivate()
after = state()
print(json.dumps([sorted(changed), [k for k in after if after[k] != before.get(k)]]))
"""
    )

    changed, left = interpreters.run(code, bed=True)

    assert "megatron.core.transformer.moe.router:TopKRouter" in changed
    assert left == []


def test_without_the_plugin_megatron_is_untouched() -> None:
    code = (
        ROUTER
        + """
import dataclasses, json, sys
from megatron.core.transformer.transformer_config import TransformerConfig
names = {f.name for f in dataclasses.fields(TransformerConfig)}
try:
    import megatron.core.transformer.moe.router_replay
    module = True
except ImportError:
    module = False
print(json.dumps(["enable_routing_replay" in names, module, "replay_patch.patches" in sys.modules]))
"""
    )

    field, module, patches = interpreters.run(code, bed=True)

    assert not field
    assert module == ("megatron/core" in str(find_spec_of_real_router_replay()))
    assert not patches


def find_spec_of_real_router_replay() -> str | None:
    """The file of Megatron's own module, if this release has one."""
    spec = find_spec("megatron.core.transformer.moe.router_replay")
    return None if spec is None else spec.origin


def test_the_plugin_survives_a_megatron_that_cannot_be_imported() -> None:
    """Case 12: without triton `import megatron.core` fails from 0.18 on."""
    code = """
        import json, torch, replay_patch
        try:
            import megatron.core
            error = None
        except ImportError as e:
            error = str(e)
        s = replay_patch.status()
        print(json.dumps([error, s.enabled, s.active, list(s.problems)]))
    """

    error, *state = interpreters.run(code, REPLAY_PATCH="1")

    assert error in (None, "No module named 'triton'")
    assert state == [True, True, []]


@pytest.mark.parametrize("name", ["0.9", "0.100.0"])
def test_the_version_string_decides_nothing(name: str) -> None:
    """Case D6."""
    code = (
        "import megatron.core.package_info as info\n"
        f"info.__version__ = {name!r}\n"
        + ROUTER
        + """
import json, replay_patch
print(json.dumps({p.name: p.state for p in replay_patch.status().patches}))
"""
    )
    import replay_patch

    expected = {p.name: p.state for p in replay_patch.status().patches}

    assert interpreters.run(code, bed=True, REPLAY_PATCH="1") == expected


def test_names_bound_by_value_are_patched_too() -> None:
    """Case 90: router.py and trainers import the top-k function by name."""
    code = """
        import json, sys, types
        from megatron.core.transformer.moe import moe_utils, router
        name = next(n for n in ("topk_softmax_with_capacity", "topk_routing_with_score_function")
                    if hasattr(router, n))
        trainer = types.ModuleType("trainer")
        sys.modules["trainer"] = trainer
        setattr(trainer, name, getattr(moe_utils, name))
        original = getattr(moe_utils, name)
        import replay_patch
        replay_patch.activate()
        found = [getattr(m, name) for m in (moe_utils, router, trainer)]
        print(json.dumps([f is found[0] and f.__wrapped__ is original for f in found]))
    """

    assert interpreters.run(code, bed=True) == [True, True, True]


def test_a_release_whose_seam_is_missing_fails_where_replay_is_used() -> None:
    code = """
        import json
        import megatron.core.transformer.moe.router as router
        for name in ("topk_softmax_with_capacity", "topk_routing_with_score_function"):
            vars(router).pop(name, None)
        import replay_patch
        errors = []
        for use in (
            replay_patch.activate,
            lambda: TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2,
                                      enable_routing_replay=True),
        ):
            from megatron.core.transformer.transformer_config import TransformerConfig
            try:
                use()
            except replay_patch.PatchNotActive as error:
                errors.append(str(error))
        plain = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
        print(json.dumps([errors, plain.enable_routing_replay]))
    """

    errors, plain = interpreters.run(code, bed=True)

    assert len(errors) == 2
    for error in errors:
        assert f"megatron-core {megatron.core.__version__}" in error
        assert "supports megatron-core 0.12.0 and later" in error
    assert plain is False


@pytest.mark.parametrize("skip", vital_names())
def test_a_skipped_patch_is_refused_where_it_is_needed(skip: str) -> None:
    import replay_patch

    needed = {p.name: p.state for p in replay_patch.status().patches}[skip] == "active"
    code = (
        ROUTER
        + """
import json, replay_patch
from megatron.core.transformer.transformer_config import TransformerConfig
try:
    TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2,
                      enable_routing_replay=True)
    error = None
except replay_patch.PatchNotActive as e:
    error = str(e)
print(json.dumps(error))
"""
    )

    error = interpreters.run(code, bed=True, REPLAY_PATCH="1", REPLAY_PATCH_SKIP=skip)

    if needed:
        assert f"patch {skip} is skipped: named in REPLAY_PATCH_SKIP" in error
    else:
        assert error is None
