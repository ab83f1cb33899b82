"""The question that a router puts to its replay object: which experts does each token take?

`Selection` is the question; a `ReplayObject` in `router.router_replay` answers it. There are two:
* `RouterReplay` does what its action says: Megatron's own (0.16 on, with our patch on it), or ours
  (`replay_patch.replay.router_replay`, before that);
* `SessionReplay`, while the model is in a recording() or replaying() block.
T tokens, E experts, K top-k.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from replay_patch.patching.compiling import opaque
from replay_patch.refusals import Where, refuse, warn_once

NativeTopk = Callable[..., tuple[Tensor, Tensor]]
"""The release's own selection: `native(scores, topk, num_groups, group_topk)` -> (values, ids)."""


@dataclass(frozen=True)
class Selection:
    """The final selection of experts in one router call, as the release is about to make it.

    Attributes:
        scores: float [T, E], what the release selects on (logits, scores, or scores plus bias).
        topk: K.
        num_groups, group_topk: of group-limited routing; None without.
        native: the release's own selection.
    """

    scores: Tensor
    topk: int
    num_groups: int | None
    group_topk: int | None
    native: NativeTopk

    def native_choice(self) -> tuple[Tensor, Tensor]:
        """(values, ids), each [T, K], that the release would take."""
        return self.native(
            self.scores, self.topk, num_groups=self.num_groups, group_topk=self.group_topk
        )

    def native_ids(self) -> Tensor:
        """int64 [T, K], what the release would take. Leaves no trace in the autograd graph: a
        recompute, which has the ids already, must save as many tensors for the backward."""
        scores = self.scores.detach()
        return self.native(
            scores, self.topk, num_groups=self.num_groups, group_topk=self.group_topk
        )[1]


class ReplayObject(Protocol):
    """What stands in `router.router_replay`. `selections` counts those that it has made."""

    selections: int

    @property
    def layer_number(self) -> int | None:
        """Megatron's of its router, from 1; None if the router was given none."""

    @property
    def mtp_depth(self) -> int:
        """0 in the decoder, else the place of its router's block in `mtp.layers`, from 1."""

    @property
    def router_replay_action(self) -> object:
        """None: the router routes natively, and nothing below is called."""

    @property
    def uncounted_rows(self) -> Tensor | None:
        """bool [T, 1]: rows of the running call that the expert bias does not count; None: none."""

    def begin_call(self, router: Any, hidden: Any) -> Callable[[], None]:
        """Find what a call of the router is to do, before the release's own code counts losses.

        Args:
            router: a TopKRouter.
            hidden: its input [S, B, H], None if it was not given one.
        Returns:
            What takes back the traces of the call if it fails.
        Raises:
            RouteError: the call cannot be right; nothing is changed.
        """

    def choose(self, selection: Selection) -> tuple[Tensor, Tensor]:
        """Make the selection of the running call: (values, ids), each [T, K], ids int64, values the
        scores at them. Raises RouteError if the ids for it do not fit."""

    def end_call(self) -> None:
        """Forget the call, whether it succeeded or not."""

    @property
    def get_replay_topk(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """What Megatron's top-k function calls, with the parameters of the function below."""


def get_replay_topk(
    self: ReplayObject,
    scores: Tensor,
    topk: int,
    num_groups: int | None = None,
    group_topk: int | None = None,
    default_compute_topk: NativeTopk | None = None,
) -> tuple[Tensor, Tensor]:
    """(values, ids) of the final selection, each [tokens, topk]. A method of our replay objects.

    `scores`: float [tokens, experts], what the release selects on; `default_compute_topk`: its own
    selection, which takes the four arguments before it.
    Raises RouteError if there is no native selection, or the ids do not fit.
    """
    native = check_native(self, default_compute_topk)
    if self.router_replay_action is None:
        return native(scores, topk, num_groups, group_topk)
    return ask(self, scores, topk, num_groups, group_topk, native)


def check_native(replay: ReplayObject, native: NativeTopk | None) -> NativeTopk:
    """The native selection that `get_replay_topk` is given; raises RouteError if it is None."""
    if native is None:
        expected = "the native selection"
        refuse("get_replay_topk() without default_compute_topk", expected, Where.of(replay))
    return native


@opaque
def ask(
    replay: ReplayObject,
    scores: Tensor,
    topk: int,
    num_groups: int | None,
    group_topk: int | None,
    native: NativeTopk,
) -> tuple[Tensor, Tensor]:
    """`get_replay_topk` of a replay object that has an action, out of sight of torch.compile."""
    return replay.choose(Selection(scores, topk, num_groups, group_topk, native))


def warn_unfused(replay: ReplayObject) -> None:
    """Say once that the fused kernel is not used; it takes no expert ids."""
    warn_once(
        "moe_router_fusion: the router of %s runs unfused while it records or replays",
        Where.of(replay),
    )


def refuse_precomputed(replay: ReplayObject) -> None:
    """Raise RouteError: the caller has chosen the experts already."""
    refuse("precomputed expert ids", "a router that selects by top-k", Where.of(replay))
