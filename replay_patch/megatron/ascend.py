"""MindSpeed's features that make a replay wrong, or with which none was tested: refused by name.

A feature is on if the config says so, or MindSpeed's arguments do (it reads some of them while a
model runs), or if a function of it stands where Megatron's own was. That MindSpeed is there is no
reason to refuse: what is not listed does not touch the routing. (Not named "mindspeed", because
MindSpeed leaves modules of that name out when it takes its patches back.)
"""

import sys
from dataclasses import dataclass
from typing import Any

from replay_patch.errors import RouteError
from replay_patch.patching import probe
from replay_patch.patching.wrappers import chain, module_of
from replay_patch.refusals import installed_megatron

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_REPLACEABLE = (
    "megatron.core.tensor_parallel.random:checkpoint",
    f"{_SCHEDULES}:get_forward_backward_func",
    f"{_SCHEDULES}:forward_backward_no_pipelining",
    f"{_SCHEDULES}:forward_backward_pipelining_with_interleaving",
    f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving",
    f"{_SCHEDULES}:forward_step",
    f"{_SCHEDULES}:backward_step",
)
"""Where a function of MindSpeed, of whatever feature, means that a replay is not known to work."""


@dataclass(frozen=True)
class Feature:
    """One refused feature of MindSpeed.

    Attributes:
        options: its command line options; as names of arguments they switch it on.
        why: why it is refused.
        module: each a part of the name of a module that its functions or classes are in.
        value: what the argument has to be; None: anything that is true.
    """

    options: tuple[str, ...]
    why: str
    module: tuple[str, ...]
    value: str | None = None

    @property
    def name(self) -> str:
        """As on a command line."""
        return " or ".join(self.options) + (f" {self.value}" if self.value else "")


_OWN_SCHEDULE = "a schedule of its own: no replay with it was tested"

REFUSED = (
    Feature(
        ("--recompute-in-bubble", "--recompute-in-advance"),
        "it recomputes by plain calls outside of the backward, in an order of its own, so that a "
        "recompute cannot be told from a forward",
        ("ripipe", "tensor_parallel.random"),
    ),
    Feature(
        ("--moe-fb-overlap",),
        "it runs the forward of one microbatch inside the backward of another, and recomputes by "
        "plain calls",
        ("fb_overlap",),
    ),
    Feature(
        ("--schedules-method",),
        "a rank's two chunks lie in a V, and MindSpeed's layer offsets are those of whichever "
        "chunk is current",
        ("dualpipev",),
        "dualpipev",
    ),
    Feature(("--fix-router",), "it overwrites the experts that were chosen with fixed ones", ()),
    Feature(
        ("--moe-alltoall-overlap-comm", "--moe-allgather-overlap-comm"),
        "its MoE layer runs the router inside of an autograd function, always with gradients, and "
        "needs NPU kernels: no replay of it was tested",
        ("overlap",),
    ),
    Feature(
        ("--moe-alltoall-mc2",),
        "its MoE layer is NPU kernels: no replay of it was tested",
        ("mc2",),
    ),
    Feature(
        ("--balanced-moe-experts",),
        "it sends tokens to copies of hot experts, by counts of its own: no replay of it was "
        "tested",
        ("balanced_moe",),
    ),
    Feature(("--use-multiparameter-pipeline-model-parallel",), _OWN_SCHEDULE, ("multi_parameter",)),
    Feature(("--optimize-send-recv-comm",), _OWN_SCHEDULE, ("optimize_send_recv_comm",)),
    Feature(("--dist-train",), _OWN_SCHEDULE, ("dist_train",)),
    Feature(
        ("--tp-2d",), "router rows are cut over two axes: no replay of it was tested", ("tp_2d",)
    ),
)


def refuse_features(config: Any, model: Any = None) -> None:
    """Raise RouteError if a feature that a replay is refused with is on: by the config of a model
    or router, or by MoE layers of MindSpeed's in the model, if one is given."""
    if "mindspeed" not in sys.modules:
        return
    for feature in REFUSED:
        for option in feature.options:
            name = option.strip("-").replace("-", "_")
            for where, holder in (("the config", config), ("MindSpeed's arguments", _arguments())):
                value = getattr(holder, name, None)
                if value == feature.value if feature.value else _on(value):
                    _refuse(feature.name, f"{name} is {value!r} in {where}", feature.why)
    for path in _REPLACEABLE:
        for function in chain(probe.find(path)):
            if is_of_mindspeed(function):
                module, name = module_of(function), getattr(function, "__name__", function)
                _refuse_feature_of(module, f"{path} is {module}.{name}")
    for path, layer in model.named_modules() if model is not None else ():
        module = type(layer).__module__
        if module.startswith("mindspeed") and hasattr(layer, "router"):
            found = f"{path} is a {module}.{type(layer).__name__}"
            if "TptoEp" not in type(layer).__name__:  # tp_extend_ep, which is supported
                _refuse_feature_of(f"{module}.{type(layer).__name__.lower()}", found)


def is_of_mindspeed(function: Any) -> bool:
    """Whether a function, or what is called as one, is MindSpeed's (or of mindspeed_llm etc.)."""
    return module_of(function).partition(".")[0].startswith("mindspeed")


def _on(value: Any) -> bool:
    return bool(value) and str(value).lower() not in ("false", "0", "none")


def _arguments() -> Any:
    for module, name in (("args_utils", "get_full_args"), ("megatron_adaptor", "_ARGS")):
        arguments = getattr(sys.modules.get(f"mindspeed.{module}"), name, None)
        if arguments is not None:
            return arguments() if callable(arguments) else arguments
    return None


def _refuse_feature_of(module: str, found: str) -> None:
    for feature in REFUSED:
        if any(part in module for part in feature.module):
            _refuse(feature.name, found, feature.why)
    _refuse("a MindSpeed feature that replay-patch does not know", found, "it was not tested")


def _refuse(name: str, found: str, why: str) -> None:
    raise RouteError(
        f"{installed_megatron()} with MindSpeed: routing replay with {name} ({found}); expected it "
        f"off, because {why}. Switch it off, or switch replay off"
    )
