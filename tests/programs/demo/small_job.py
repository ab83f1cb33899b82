"""For tests/release/demo/test_demo.py: the demo's job, smaller."""

from typing import Any

SIZES = {
    "layers": 4,
    "hidden": 32,
    "experts": 16,
    "vocabulary": 64,
    "init_std": 0.2,
    "sequences": 8,
    "prompt": 4,
    "length": 16,
    "steps": 2,
}


def results(*seeds: int) -> list[Any]:
    from replay_patch.demo.experiment import run
    from replay_patch.demo.model import Sizes

    return [run(seed, Sizes(**SIZES)) for seed in seeds]


def tampered() -> str:
    """The error of a job whose routers choose natively, whatever is to be replayed."""
    from replay_patch.demo.experiment import run
    from replay_patch.demo.model import Sizes
    from replay_patch.errors import ReplayPatchError
    from replay_patch.replay import selection

    original = selection.ask

    def ask(
        replay: Any, scores: Any, topk: int, num_groups: Any, group_topk: Any, native: Any
    ) -> Any:
        original(replay, scores, topk, num_groups, group_topk, native)  # keeps all its books
        return native(scores, topk, num_groups=num_groups, group_topk=group_topk)

    selection.ask = ask
    try:
        run(0, Sizes(**SIZES))
    except ReplayPatchError as error:
        return str(error)
    return "no error"
