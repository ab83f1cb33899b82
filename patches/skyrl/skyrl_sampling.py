"""Without this patch SkyRL's dynamic sampling loses the routes of the samples that it keeps, or
leaves a new sample those of the one it replaces."""

from collections.abc import Callable
from typing import Any

from replay_patch.patches.skyrl._batches import FIELD
from replay_patch.patching import Patch, probe, wrappers_at

_MODULE = "skyrl.train.utils.trainer_utils"
_FILTER, _REPLACE = f"{_MODULE}:filter_generator_output", f"{_MODULE}:handle_replace_sampling"


def _needed() -> tuple[bool, str]:
    filtering, replacing = probe.find(_FILTER), probe.find(_REPLACE)
    if filtering is None or replacing is None:
        return False, "this release samples in another way"
    fields = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", FIELD)
    samples = {name: [[0], [1]] for name in fields} | {"rollout_logprobs": None}
    kept = filtering(samples, [1]).get(FIELD)
    # No call of the other one: it writes into the log, and draws random numbers.
    names_it = FIELD in probe.constants(replacing)
    wrong = kept != [[1]] or not names_it
    return wrong, f"routes {'do not ' if wrong else ''}follow their samples"


def _filter_with_routes(original: Callable[..., Any]) -> Callable[..., Any]:
    def filter_generator_output(output: Any, kept_indices: list[int]) -> Any:
        filtered = original(output, kept_indices)
        if output.get(FIELD) is not None:
            filtered[FIELD] = [output[FIELD][i] for i in kept_indices]
        return filtered

    return filter_generator_output


def _replace_with_routes(original: Callable[..., Any]) -> Callable[..., Any]:
    def handle_replace_sampling(generator_output: Any, *args: Any, **kwargs: Any) -> Any:
        if generator_output.get(FIELD) is None:
            return original(generator_output, *args, **kwargs)
        # It moves stop reasons with their samples: so it gets the samples' numbers instead of them.
        reasons, routes = generator_output["stop_reasons"], generator_output[FIELD]
        generator_output["stop_reasons"] = taken = list(range(len(routes)))
        try:
            return original(generator_output, *args, **kwargs)
        finally:
            generator_output["stop_reasons"] = reasons and [reasons[i] for i in taken]
            generator_output[FIELD] = [routes[i] for i in taken]

    return handle_replace_sampling


PATCH = Patch(
    name="skyrl_sampling",
    library="skyrl",
    targets=(_FILTER, _REPLACE),
    modules=(_MODULE,),
    requires="skyrl",
    why=(
        "Dynamic sampling copies a list of fields, and routes are not on it: with `filter` they "
        "are lost, so that the step trains on native routing; with `replace` a new sample gets "
        "the routes of the one that it replaces."
    ),
    how="The routes of each sample are copied with the other fields; SkyRL's own choices stay.",
    upstream="https://github.com/NovaSky-AI/SkyRL/issues/1908",
    remove_when="SkyRL copies all fields of a sample",
    needed=_needed,
    apply=wrappers_at({_FILTER: _filter_with_routes, _REPLACE: _replace_with_routes}),
)
