"""What has moved under the patches, in words: on made-up fingerprints and a made-up Megatron."""

import functools
from pathlib import Path
from typing import Any

import pytest

from replay_patch.drift import comparison, examination
from replay_patch.drift.fingerprints import fingerprint
from replay_patch.matrix.environments import TESTED_RELEASES

ROUTER = "megatron.core.transformer.moe.router"
GATING, INIT = f"{ROUTER}:Router.gating", f"{ROUTER}:TopKRouter.__init__"  # of one patch each
CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig"
ROUTING = f"{ROUTER}:TopKRouter.routing"  # two patches stand on it
NEED = "needed:router_topk"

FUNCTION = {
    "kind": "function",
    "parameters": ["self", "scale=1.0"],
    "names": ["torch.softmax", "torch.topk"],
    "code": "1",
}
CLASS = {
    "kind": "class",
    "bases": ["Base"],
    "methods": ["add(self, x)", "sub(self, x)"],
    "fields": ["moe_router_topk=2"],
}
ABSENT = {"kind": "absent"}


def releases(**of: dict[str, Any]) -> dict[str, Any]:
    """Known targets: release (with _ for .) -> its fingerprints."""
    named = {name.strip("r").replace("_", "."): targets for name, targets in of.items()}
    return {
        "releases": list(named),
        "targets": {
            target: [{"releases": [r], "is": named[r][target]} for r in named]
            for target in next(iter(named.values()))
        },
    }


def what(old: dict[str, Any], new: dict[str, Any], target: str = GATING) -> list[str]:
    items = comparison.compare({target: new}, releases(r1_0={target: old}))
    return [item["what"] for item in items]


# --- the data -----------------------------------------------------------------------------------


def test_the_data_is_of_all_targets_on_all_tested_releases() -> None:
    """Else: python -m replay_patch.matrix.fingerprints_on_bed --write."""
    data = comparison.known_targets()

    assert data["releases"] == list(TESTED_RELEASES)
    assert data["targets"].keys() == comparison.watched().keys()
    for variants in data["targets"].values():
        of_all = [release for variant in variants for release in variant["releases"]]
        assert sorted(of_all) == sorted(TESTED_RELEASES)


@pytest.mark.parametrize("release", TESTED_RELEASES)
def test_each_tested_release_is_known_to_itself(release: str) -> None:
    live = {
        target: next(v["is"] for v in variants if release in v["releases"])
        for target, variants in comparison.known_targets()["targets"].items()
    }

    assert comparison.compare(live) == []


# --- compare ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "new, words",
    [
        ({}, []),
        (
            {"parameters": ["self", "scale=1.0", "mask=None"]},
            ["takes a new parameter `mask` (default None)"],
        ),
        (
            {"parameters": ["self", "scale=1.0", "mask"]},
            ["takes a new parameter `mask`"],
        ),
        (
            {"parameters": ["self", "scale=1.0", "mask=None, keyword only", "**kwargs"]},
            ["takes a new parameter `mask` (default None, keyword only), `**kwargs`"],
        ),
        ({"parameters": ["self"]}, ["no longer takes `scale`"]),
        (
            {"parameters": ["self", "scale=2.0"]},
            ["takes `scale` (default 2.0), not `scale` (default 1.0)"],
        ),
        (
            {"parameters": ["scale=1.0", "self"]},
            ["has its parameters in another order: scale=1.0, self"],
        ),
        (
            {"names": ["torch.softmax", "topk="], "code": "2"},
            ["its code now uses `topk=`; its code no longer uses `torch.topk`"],
        ),
        ({"code": "2"}, ["its code has changed (same signature, same names)"]),
        (
            {"parameters": ["self", "scale=1.0", "mask=None"], "code": "2"},
            ["takes a new parameter `mask` (default None); its code has changed (same names)"],
        ),
        ({"kind": "staticmethod"}, ["is a staticmethod, not a function"]),
    ],
)
def test_a_function_that_moved(new: dict[str, Any], words: list[str]) -> None:
    assert what(FUNCTION, FUNCTION | new) == words


@pytest.mark.parametrize(
    "new, words",
    [
        (
            {"methods": ["add(self, x, y=1)", "mul(self)"]},
            "has a new method `mul(self)`; no longer has the method `sub`; "
            "has the method `add(self, x, y=1)`, not `add(self, x)`",
        ),
        (
            {"fields": ["moe_router_topk=2", "replay=False"]},
            "has a new field `replay` (default False)",
        ),
        ({"fields": []}, "no longer has the field `moe_router_topk`"),
        (
            {"fields": ["moe_router_topk=3"]},
            "has the field `moe_router_topk` (default 3), not `moe_router_topk` (default 2)",
        ),
        ({"bases": []}, "no longer derives from `Base`"),
    ],
)
def test_a_class_that_moved(new: dict[str, Any], words: str) -> None:
    assert what(CLASS, CLASS | new, CONFIG) == [words]


def test_a_module_with_a_new_class() -> None:
    old, new = ({"kind": "module", "classes": c} for c in (["A"], ["A", "B"]))

    assert what(old, new, f"{ROUTER}:") == ["has a new class `B`"]


def test_what_has_gone_or_come() -> None:
    gone = ABSENT | {"reason": "there is no module megatron.core.transformer.moe"}

    assert what(FUNCTION, ABSENT) == ["is gone"]
    assert what(FUNCTION, gone) == [f"is gone: {gone['reason']}"]
    assert what(ABSENT, FUNCTION) == ["is there; 1.0 does not have it"]
    assert what(ABSENT, gone) == []


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("not needed", "needed", "is needed here, and not on the tested releases: so it is"),
        ("needed", "not needed", "is not needed here, and is on the tested releases: so it is"),
        ("needed", "LookupError", "cannot tell whether it is needed: LookupError: so it is"),
    ],
)
def test_a_need_that_no_tested_release_has(old: str, new: str, words: str) -> None:
    assert what({"kind": old}, {"kind": new, "reason": "so it is"}, NEED) == [words]


def test_many_names_are_cut() -> None:
    names = [f"torch.f{i}" for i in range(10)]

    (words,) = what(FUNCTION, FUNCTION | {"names": [*FUNCTION["names"], *names]})

    assert words.endswith("`torch.f7` and 2 more")


def test_what_cannot_be_seen_is_left_out() -> None:
    assert what(FUNCTION, {"kind": "unseen", "reason": "ImportError: triton"}) == []


def test_the_nearest_release_is_the_one_that_agrees_most_and_the_newest_of_equals() -> None:
    other = FUNCTION | {"code": "other"}
    data = releases(
        r1_0={GATING: FUNCTION, INIT: FUNCTION, ROUTING: FUNCTION},
        r1_1={GATING: other, INIT: FUNCTION, ROUTING: FUNCTION},
        r1_2={GATING: other, INIT: FUNCTION, ROUTING: FUNCTION},
        r1_3={GATING: other, INIT: other, ROUTING: FUNCTION},
    )

    items = comparison.compare({GATING: other, INIT: FUNCTION, ROUTING: ABSENT}, data)

    assert [(i["patch"], i["target"], i["what"], i["nearest"]) for i in items] == [
        ("fused_router", ROUTING, "is gone", "1.2"),
        ("router_topk", ROUTING, "is gone", "1.2"),
    ]


def test_a_combination_that_no_release_has_is_told() -> None:
    data = releases(
        r1_0={GATING: FUNCTION, INIT: FUNCTION, NEED: {"kind": "needed"}},
        r1_1={GATING: ABSENT, INIT: ABSENT, NEED: {"kind": "not needed"}},
    )
    live = {GATING: ABSENT, INIT: ABSENT, NEED: {"kind": "needed", "reason": "it lacks one"}}

    (item,) = comparison.compare(live, data)

    assert item == {
        "patch": "router_topk",
        "target": NEED,
        "what": "is needed here, and not on 1.1: it lacks one (as on 1.0; the combination is not "
        "tested)",
        "nearest": "1.1",
    }


def test_lines_for_people() -> None:
    here = {ROUTING: ABSENT, NEED: {"kind": "not needed", "reason": "it takes ids"}}
    data = releases(r1_0={ROUTING: FUNCTION, NEED: {"kind": "needed"}})

    assert comparison.describe(comparison.compare(here, data)).splitlines() == [
        "This Megatron differs from the tested releases (the nearest is 1.0):",
        f"  - {ROUTING}: is gone [fused_router, router_topk]",
        "  - patch router_topk: is not needed here, and is on the tested releases: it takes ids "
        "[router_topk]",
    ]
    assert comparison.describe([]) == ""


# --- fingerprints -------------------------------------------------------------------------------


def plain(config, probs, *, fused=False):
    top = min(config.topk, 3, key=probs.get)
    return functools.reduce(probs.add, [top])


def dressed(
    config: Any,  # a comment
    probs: Any,
    *,
    fused: bool = False,
) -> Any:
    """Words."""

    # a comment
    top = min(config.topk,   3, key=probs.get)  # fmt: skip
    return functools.reduce(
        probs.add,
        [top],
    )


def other(config, probs, *, fused=False):
    top = min(config.topk, 4, key=probs.get)
    return functools.reduce(probs.add, [top])


def test_comments_docstrings_annotations_and_layout_do_not_matter() -> None:
    assert fingerprint(plain)["names"] == [
        "config.topk",
        "functools.reduce",
        "key=",
        "probs.add",
        "probs.get",
    ]
    assert fingerprint(plain)["parameters"] == ["config", "probs", "fused=False, keyword only"]
    assert fingerprint(dressed) == fingerprint(plain)
    assert fingerprint(other) == fingerprint(plain) | {"code": fingerprint(other)["code"]}
    assert fingerprint(other) != fingerprint(plain)


def test_a_wrapped_function_is_what_is_wrapped() -> None:
    @functools.wraps(plain)
    def wrapper(*args, **kwargs):
        return plain(*args, **kwargs)

    assert fingerprint(wrapper) == fingerprint(plain)


# --- a fresh interpreter ------------------------------------------------------------------------


def megatron(folder: Path, core: str | None) -> Path:
    """A folder with a package of that name; `core` is the code of megatron.core."""
    package = folder / "megatron"
    package.mkdir()
    (package / "__init__.py").touch()  # hides an installed one
    if core is not None:
        (package / "core").mkdir()
        (package / "core" / "__init__.py").write_text(core)
    return folder


@pytest.mark.parametrize(
    "core, problem",
    [
        (None, "there is no megatron.core on the path"),
        ("print('hello'); import none_such", "not all of it can be imported: ModuleNotFoundError"),
        ("import os; os._exit(3)", "importing Megatron ended Python (exit code 3): no message"),
        ("import os; os._exit(0)", "importing Megatron ended Python (exit code 0): no message"),
    ],
)
def test_a_megatron_that_cannot_be_looked_at(core: str, problem: str, tmp_path: Path) -> None:
    found = examination.examine([megatron(tmp_path, core)])

    assert found["drift"] == []
    assert found["problem"].startswith(problem)


def test_a_megatron_that_hangs(tmp_path: Path) -> None:
    hanging = megatron(tmp_path, "import time; time.sleep(60)")

    found = examination.examine([hanging], timeout=0.5)

    assert found["problem"] == "importing Megatron was not finished after 0.5 s"
