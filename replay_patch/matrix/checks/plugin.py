"""Checks of what the plugin does to a process: activation, config fields, and nothing when off."""

import copy
import dataclasses
import hashlib
import json
import os
import pickle
import subprocess
import sys
from typing import Any

import replay_patch
from replay_patch.matrix import tiny
from replay_patch.matrix.registry import check
from replay_patch.patching.registry import patches

FLAGS = ("enable_routing_replay", "moe_enable_routing_replay", "moe_router_fusion")


@check("activation", every_patch=True)
def activation() -> None:
    """`import torch` activates the plugin, or `import replay_patch.auto` where torch loads none;
    then every patch is in place or not needed."""
    import torch

    ask = "import replay_patch, json; print(json.dumps(replay_patch.status().trigger))"
    if hasattr(torch, "_import_device_backends"):  # from 2.5 on
        found = _fresh(f"import torch; {ask}", REPLAY_PATCH="1")
        assert found == "torch.backends", (
            f"import torch activated nothing (trigger {found!r}, expected 'torch.backends'): is "
            "replay-patch installed, and does no stale dist-info hide it? `replay-patch doctor`"
        )
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "REPLAY_PATCH": "1"}
    found = _fresh(f"import torch, replay_patch.auto; {ask}", **off)
    assert found == "replay_patch.auto", f"import replay_patch.auto gave the trigger {found!r}"

    status = replay_patch.status()
    states = {p.name: (p.state, p.reason) for p in status.patches}
    wrong = {k: v for k, v in states.items() if v[0] not in ("active", "not needed")}
    assert not wrong, f"patches that are neither active nor not needed: {wrong}"
    assert not status.problems, f"problems: {status.problems}"


@check("off-is-off")
def off_is_off() -> None:
    """With the plugin off nothing of it is imported and nothing in Megatron is changed; on and
    unused, output and gradients of a model are bitwise the same."""
    loaded = _fresh(
        "import torch, sys, json; print(json.dumps([m for m in sys.modules if "
        "m.split('.')[0] in ('replay_patch', 'wrapt', 'megatron')]))"
    )
    extra = set(loaded) - {"replay_patch", "replay_patch.autoload"}
    assert not extra, f"imported though off: {sorted(extra)}"

    setup = "from replay_patch.matrix.checks import plugin as p; import json; "
    if "mindspeed" in sys.modules:
        setup += "from replay_patch.matrix import ascend_bed, cpu; "
        setup += "cpu.install(); ascend_bed.adapt(); "
    off = _fresh(f"{setup}d = p.digest(); print(json.dumps([d, p.ours()]))")
    assert off[1] == [], f"ours in Megatron though off: {off[1]}"
    assert off[0] == digest(), "a model computes something else with the plugin on and unused"


def digest() -> str:
    """A hash of the output and the gradients of a small model that trains without replay."""
    tiny.init()
    config = tiny.moe_config(moe_z_loss_coeff=1e-3)
    model = tiny.gpt_model(config)
    import torch

    tokens = torch.arange(32).reshape(2, 16) % 32
    positions = torch.arange(16).expand(2, -1)
    loss = model(tokens, positions, None, labels=tokens).float().mean()
    loss.backward()
    found = hashlib.sha256()
    for tensor in (loss, *(p.grad for p in model.parameters())):
        found.update(tensor.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()


def ours() -> list[str]:
    """Functions of this package in the modules of Megatron that patches change."""
    modules = {target.partition(":")[0] for patch in patches() for target in patch.targets}
    found = []
    for name in sorted(modules & sys.modules.keys()):
        for key, value in vars(sys.modules[name]).items():
            members = vars(value) if isinstance(value, type) else {}
            named = {key: value} | {f"{key}.{k}": v for k, v in members.items()}
            for path, function in named.items():
                function = getattr(function, "__func__", function)
                if is_ours(function):
                    found.append(f"{name}:{path}")
    return found


def is_ours(function: Any) -> bool:
    """Whether a function is of this package, and not of its matrix."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return "replay_patch" in file and os.path.join("replay_patch", "matrix") not in file


@check("config-fields", replays=True)
def config_fields() -> None:
    """`TransformerConfig` takes the replay flags as real fields, on whatever release."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    _check_config(TransformerConfig)


@check("config-mla", replays=True)
def config_mla() -> None:
    """`MLATransformerConfig`, whose `__init__` is its own, takes them, too."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    _check_config(MLATransformerConfig, rope_type="rope")


@check("config-subclass")
def config_subclass() -> None:
    """A trainer's dataclass that derives from the config takes them, too."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclasses.dataclass
    class Provider(TransformerConfig):  # type: ignore[misc]
        extra: int = 3

    globals()["Provider"] = Provider  # pickle looks for it here
    Provider.__qualname__ = "Provider"
    _check_config(Provider)


def _check_config(cls: Any, **options: Any) -> None:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2} | options
    plain = cls(**sizes)
    for flag in FLAGS:
        name = f"{cls.__name__}.{flag}"
        assert getattr(plain, flag) is False, f"{name} is {getattr(plain, flag)!r} by default"
        config = cls(**sizes, **{flag: True})
        copies = {
            "the constructor": config,
            "copy.deepcopy": copy.deepcopy(config),
            "dataclasses.replace": dataclasses.replace(config, hidden_size=32),
            "pickle": pickle.loads(pickle.dumps(config)),
        }
        for how, made in copies.items():
            assert getattr(made, flag) is True, f"{name}=True is lost by {how}"
        assert flag in {f.name for f in dataclasses.fields(config)}, f"{name} is no field"


def _fresh(code: str, **env: str) -> Any:
    """The JSON value that `code` prints last, in an interpreter of its own."""
    clean = {k: v for k, v in os.environ.items() if k != "REPLAY_PATCH"}
    clean["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=clean | env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{code!r} ended with {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])
