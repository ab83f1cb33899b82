"""Patches are found by the names of their files; what cannot be put in order is refused."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replay_patch.patching import registry

PATCH = """
from replay_patch.patching.patch import Patch

PATCH = Patch(
    name={name!r}, library="example", targets=(), modules=("example",), requires={requires!r},
    why="", how="", upstream="none", remove_when="", needed=lambda: (True, ""),
    apply=lambda transaction: None, after={after!r}, vital={vital!r},
)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write one file of a package that stands in the place of `replay_patch.patches`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_PACKAGE", "patches_of_a_test")
    registry.patches.cache_clear()

    def write(
        path: str,
        after: tuple[str, ...] = (),
        name: str | None = None,
        vital: bool = False,
        requires: str = "example",
    ) -> None:
        file = tmp_path / "patches_of_a_test" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (file.parent, file.parent.parent):
            (folder / "__init__.py").touch()
        fields = {"name": name or file.stem, "after": after, "vital": vital, "requires": requires}
        file.write_text(PATCH.format(**fields))
        importlib.invalidate_caches()

    yield write
    registry.patches.cache_clear()
    for loaded in [module for module in sys.modules if module.startswith("patches_of_a_test")]:
        del sys.modules[loaded]


def names() -> list[str]:
    return [patch.name for patch in registry.patches()]


def test_patches_come_by_library_and_name_each_after_those_it_names(
    write: Callable[..., None],
) -> None:
    write("b_library/first")
    write("a_library/second", after=("third", "first"))
    write("a_library/third")

    assert names() == ["third", "first", "second"]


def test_a_file_with_a_leading_underscore_is_no_patch(
    write: Callable[..., None], tmp_path: Path
) -> None:
    write("library/a_patch")
    (tmp_path / "patches_of_a_test/library/_shared.py").write_text("raise ImportError('not to be')")

    assert names() == ["a_patch"]


def test_two_patches_of_one_name_are_refused(write: Callable[..., None]) -> None:
    write("a_library/a_patch")
    write("b_library/another", name="a_patch")

    with pytest.raises(
        ValueError, match=r"two patches have the name a_patch: \S+\.another is one of them"
    ):
        registry.patches()


def test_a_patch_after_one_that_there_is_not_is_refused(write: Callable[..., None]) -> None:
    write("library/a_patch", after=("a_pach",))

    with pytest.raises(ValueError, match="a_patch comes after 'a_pach', which is no patch"):
        registry.patches()


def test_patches_that_wait_for_each_other_are_refused(write: Callable[..., None]) -> None:
    write("library/a", after=("b",))
    write("library/b", after=("c",))
    write("library/c", after=("a",))

    with pytest.raises(ValueError, match="patches wait for each other: a -> b -> c -> a"):
        registry.patches()


def test_vital_patches_and_the_modules_of_megatron_are_read_from_the_patches(
    write: Callable[..., None],
) -> None:
    write("library/a", vital=True, requires="megatron.core.router")
    write("library/b", requires="megatron.core.router")
    write("library/c", requires="a_trainer")

    assert registry.vital_names() == {"a"}
    assert registry.megatron_modules() == ("megatron.core.router",)
