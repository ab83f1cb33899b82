"""What the layer axis of routes means: the number of the layer at each place."""

from replay_patch.errors import RouteError
from replay_patch.routes.expert_ids import Layers


def axis_numbers(
    layers: Layers,
    rows: int,
    asked: tuple[int, ...],
    model: tuple[int, ...] | None,
    num_layers: int | None,
) -> tuple[int, ...]:
    """The layer number at each place.

    Args:
        layers: as in `Routes`.
        rows: places on the axis.
        asked: the layers that are wanted.
        model: all MoE layers of the model, if known.
        num_layers: of the model's decoder, if known.

    Raises:
        RouteError: it is not known for sure.
    """
    if isinstance(layers, tuple):
        return layers
    if layers == "all":
        if num_layers not in (None, rows):
            raise RouteError(
                f"{rows} layers of routes with layers='all', and the model has {num_layers}: "
                "say which layers they are, layers=(number, ...)"
            )
        return tuple(range(1, rows + 1))
    if model is None and num_layers == rows:
        model = tuple(range(1, rows + 1))
    elif model is None and len(asked) == rows:
        model = tuple(sorted(asked))
    if model is None:
        raise RouteError(
            f"{rows} layers of routes with layers='moe', and {len(asked)} layers asked for: "
            "which MoE layers the model has decides where they are; pass moe_layers="
        )
    if len(model) != rows:
        raise RouteError(
            f"{rows} layers of routes with layers='moe', and the model has {len(model)} MoE "
            f"layers, {list(model)}: say layers='all' if dense layers are among them, or which "
            "they are, layers=(number, ...)"
        )
    return model
