"""`replay-patch demo`: a small job on a release of each seam, the command itself on the newest."""

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core
import pytest
from helpers import interpreters
from programs.demo import small_job

from replay_patch.demo.launch import run_demo
from replay_patch.demo.model import SIZES
from replay_patch.demo.report import MEASURES, format_demo
from replay_patch.errors import ReplayPatchError
from replay_patch.matrix.environments import NEWEST

MEGATRON = Path(megatron.core.__file__).parents[2]
MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None

on_the_newest = pytest.mark.skipif(
    megatron.core.__version__ != NEWEST,
    reason=f"about the command, not the release: only on {NEWEST}",
)


# --- a small job ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Of the seeds 0, 0, 1 in one process."""
    return interpreters.run(small_job.results, 0, 0, 1, REPLAY_PATCH="1")


@pytest.mark.mechanism
def test_replay_repeats_every_captured_decision(
    results: list[dict[str, Any]], megatron_version: str
) -> None:
    for result in results:
        without, replayed = result["without_replay"], result["with_replay"]

        assert result["megatron"] == megatron_version
        assert 0.9 <= result["captured"] < 1
        assert replayed["router_decisions_differ"] == replayed["tokens_differ"] == 0
        assert 0 < without["router_decisions_differ"] < without["tokens_differ"] < 1
        assert 0 < replayed["kl"] < without["kl"]


@pytest.mark.mechanism
def test_a_seed_gives_the_same_numbers_again(results: list[dict[str, Any]]) -> None:
    first, again, other = results

    assert first == again
    assert other["seed"] == 1
    for run in ("without_replay", "with_replay"):
        assert first[run]["kl"] != other[run]["kl"]
        assert first["loss"][run] != other["loss"][run]


@pytest.mark.mechanism
def test_replay_that_does_not_hold_is_an_error() -> None:
    error = interpreters.run(small_job.tampered, REPLAY_PATCH="1")

    assert "replay did not hold: in training step 1" in error
    assert "router decisions differ from the rollout's; expected none" in error


# --- the command ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demo:
    """What one call of the command left."""

    stdout: str
    stderr: str
    result: dict[str, Any]
    plot: Path


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    out, plot = folder / "demo.json", folder / "demo.png"
    args = ["--megatron-path", str(MEGATRON), "--json", str(out)]
    if MATPLOTLIB:
        args += ["--plot", str(plot)]
    hostile = {"REPLAY_PATCH_STRICT": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # not for the job
    done = interpreters.python("-m", "replay_patch.cli", "demo", *args, **hostile)
    assert done.returncode == 0, done.stderr
    return Demo(done.stdout, done.stderr, json.loads(out.read_text()), plot)


@on_the_newest
def test_the_json_has_the_keys_that_are_promised(command: Demo) -> None:
    result = command.result

    promised = {"megatron", "seed", "tokens", "layers", "captured", "seconds"}
    assert promised | {"without_replay", "with_replay"} <= set(result)
    measures = {"router_decisions_differ", "tokens_differ", "kl", "extreme_tokens"}
    assert set(result["without_replay"]) == set(result["with_replay"]) == measures
    assert result["megatron"] == NEWEST
    assert result["seed"] == 0
    assert result["captured"] == 1 - 1 / SIZES.length  # all of a response but its last token
    assert result["with_replay"]["router_decisions_differ"] == 0
    assert result["without_replay"]["router_decisions_differ"] > 0.05


@on_the_newest
def test_the_text_says_what_was_done_and_found(command: Demo) -> None:
    text, result = command.stdout, command.result
    decisions = result["tokens"] * result["layers"]

    assert text == format_demo(result) + "\n"
    assert f"Megatron-core {NEWEST}, seed 0" in text
    assert [label for label in MEASURES.values() if label not in text] == []
    assert f"98.4 % of the {decisions} router decisions were captured and replayed" in text
    assert "arXiv 2510.11370" in text
    assert "tiny and random" in text
    assert "training steps in fp32 with replay" in command.stderr  # progress


@on_the_newest
@pytest.mark.skipif(not MATPLOTLIB, reason="needs matplotlib")
def test_the_plot_is_an_image(command: Demo) -> None:
    assert command.plot.read_bytes().startswith(b"\x89PNG\r\n")


# --- jobs that cannot run ---------------------------------------------------------------------


@pytest.mark.mechanism
def test_a_folder_without_megatron_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayPatchError, match=f"{tmp_path} holds no megatron/core"):
        run_demo(megatron_path=tmp_path)


@on_the_newest
def test_the_last_lines_of_a_broken_job_are_shown(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    noise = "for i in range(100): print('line', i)\n"
    (core / "__init__.py").write_text(noise + "raise RuntimeError('broken')")

    with pytest.raises(ReplayPatchError, match="exit code 1") as error:
        run_demo(megatron_path=tmp_path, progress=lambda line: None)

    text = str(error.value)
    assert str(tmp_path) in text
    assert text.splitlines()[-1].strip() == "RuntimeError: broken"
    assert "line 0\n" not in text


@on_the_newest
def test_another_megatron_that_hides_the_one_asked_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    with pytest.raises(ReplayPatchError, match=f"taken from {tmp_path}, expected from {MEGATRON}"):
        run_demo(megatron_path=MEGATRON, progress=lambda line: None)
