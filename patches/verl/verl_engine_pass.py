"""A replay pass of verl's Megatron engine leaves nothing behind, and has rows that can be right."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from replay_patch.errors import RouteError
from replay_patch.patches.verl.verl_router_lists import running
from replay_patch.patching import probe
from replay_patch.patching.patch import Patch
from replay_patch.patching.rebinding import Instead, with_globals
from replay_patch.patching.transaction import Transaction
from replay_patch.refusals import installed_megatron

_MODULE = "verl.workers.engine.megatron.transformer_impl"
_PASS = f"{_MODULE}:MegatronEngine.forward_backward_batch"
_SET = "verl.utils.megatron.router_replay_utils:set_router_replay_data"


def _needed() -> tuple[bool, str]:
    text = source(probe.find(_PASS))
    clears = "finally:" in text and "clear_global" in text
    formats = "data_format" in probe.parameters(_SET)
    return not (clears and formats), (
        f"forward_backward_batch has {'a' if clears else 'no'} finally that clears, and routes "
        f"{'are' if formats else 'are not'} laid out by data_format"
    )


def _apply(transaction: Transaction) -> None:
    cls = probe.find(f"{_MODULE}:MegatronEngine")
    transaction.wrap(cls, "forward_backward_batch", _clean)


def _clean(original: Callable[..., Any]) -> Callable[..., Any]:
    run = wide_ids(original)

    def forward_backward_batch(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "enable_routing_replay", False):
            return original(self, data, *args, **kwargs)
        tu = sys.modules["verl.utils.tensordict_utils"]  # the engine has imported it

        def of(key: str, default: Any) -> Any:
            return tu.get_non_tensor_data(data=data, key=key, default=default)

        one = not of("use_dynamic_bsz", True) and of("micro_batch_size_per_gpu", 0) == 1
        packed = self.engine_config.use_remove_padding or one or len(data) == 1
        if of("enable_routing_replay", False) and not packed:
            refuse_padded("actor_rollout_ref.model.use_remove_padding")
        warn_of_one_expert(self.tf_config, self.engine_config.router_replay.mode)
        with running(self.module), nothing_left(self):
            return run(self, data, *args, **kwargs)

    return forward_backward_batch


# --- shared with verl_actor_pass ---------------------------------------------------------------


def source(function: Any) -> str:
    """The text of a function; "" where there is none, so that its patch is applied."""
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""


def refuse_padded(setting: str) -> None:
    """Raise RouteError: rows of padded sequences are not those of packed ones."""
    raise RouteError(
        f"{installed_megatron()}, verl: routing replay with padded sequences (bshd) and more than "
        "one of them in a microbatch; verl lays routes out as rows of packed sequences, so tokens "
        f"would get each other's experts. Set {setting}=True, or a micro batch size of 1 and no "
        "dynamic batch size"
    )


def warn_of_one_expert(config: Any, mode: str) -> None:
    """Say once what cannot be seen in the ids."""
    if mode == "R3" and config.moe_router_topk == 1:
        from replay_patch import refusals

        refusals.warn_once(
            "verl, R3 with one expert per token: a rollout without this plugin fills rows that it "
            "did not capture with zeros, which is a valid route: where verl does not mask them, "
            "such tokens go to expert 0. With the plugin there the rows are -1, and route natively"
        )


@contextlib.contextmanager
def nothing_left(owner: Any) -> Any:
    """After an exception: no action, target or recorded microbatch that a later pass would take."""
    try:
        yield
    except BaseException:
        replay = sys.modules["verl.utils.megatron.router_replay_patch"].RouterReplay
        replay.clear_global_router_replay_action()
        with contextlib.suppress(RouteError):  # what was wrong with ids; the first error is raised
            replay.clear_global_indices()
        if hasattr(owner, "mini_layer_topk_idx_list"):
            owner.mini_layer_topk_idx_list = []
        raise


def wide_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that casts recorded ids to uint8, with a wider type where experts need it.

    int32, which every release's collectives take; the first argument that has a `tf_config`, or is
    one, says how many experts there are.
    """
    if not casts_to_uint8(original):
        return original
    import torch

    @functools.wraps(original, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        configs = [getattr(a, "tf_config", a) for a in (*args, *kwargs.values())]
        experts = [n for c in configs if isinstance(n := getattr(c, "num_moe_experts", 0), int)]
        if max(experts, default=0) <= 256:
            return original(*args, **kwargs)
        names = {"torch": Instead(torch, uint8=torch.int32)}
        return with_globals(original, names)(*args, **kwargs)

    return run


def casts_to_uint8(function: Any) -> bool:
    """Whether it narrows ids; from 0.9 on verl only views int16 as bytes."""
    text = source(function)
    return ".to(torch.uint8)" in text


PATCH = Patch(
    name="verl_engine_pass",
    library="verl",
    targets=(_PASS,),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "verl clears actions, targets and recorded microbatches only where a pass ends well. After "
        "an exception the next recording has microbatches of the failed one in front, and the next "
        "update's recompute takes the targets that the failed one has left in the queue. With "
        "padded sequences (use_remove_padding=False) routes are laid out as if they were packed: "
        "of sequences of one length in a microbatch each gets the other's rows, and says nothing. "
        "Before 0.9 the helpers do not know whose pass it is, and recorded ids are cast to uint8, "
        "which wraps above 256 experts."
    ),
    how=(
        "`forward_backward_batch` is verl's own, with actions, targets and recordings cleared when "
        "it raises; in it verl's helpers find the routers of this engine's model; replay with "
        "padded microbatches of several sequences is refused; with more than 256 experts "
        "`torch.uint8` means int32 in it. R3 with one expert per token is warned of: zeros, which "
        "verl fills in where nothing was captured, are a valid route then."
    ),
    upstream="none known: verl 0.9.1 still clears only where a pass ends well",
    remove_when="verl clears in a finally, and replays padded batches or refuses them",
    needed=_needed,
    apply=_apply,
)
