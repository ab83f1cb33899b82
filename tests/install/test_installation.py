"""The plugin as users install it, in fresh environments, and the processes of their jobs."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import virtual_environments

import replay_patch

ROOT = Path(__file__).parents[2]
JOBS = str(ROOT / "tests" / "programs" / "install" / "jobs.py")
STANDINS = str(ROOT / "replay_patch" / "matrix" / "standins")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module", params=["wheel", "editable", "target"])
def installed(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> "Python":
    """Runs the Python of a fresh environment that has the plugin in one way."""
    folder = tmp_path_factory.mktemp(request.param)
    python, path = virtual_environments.make(folder), ""
    if request.param == "wheel":
        virtual_environments.pip_install(python, str(wheel))
    elif request.param == "editable":
        virtual_environments.pip_install(python, "-e", str(ROOT))
    else:
        path = str(folder / "target")
        virtual_environments.pip_install(python, "--target", path, str(wheel))
    return Python(python, path)


@dataclass(frozen=True)
class Python:
    """The Python of an environment, run outside the checkout."""

    path: Path
    pythonpath: str = ""

    def __call__(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("REPLAY_PATCH", "TORCH"))}
        env = clean | {"PYTHONPATH": self.pythonpath} | env
        command = [str(self.path), *args]
        return subprocess.run(
            command, env=env, text=True, capture_output=True, cwd=self.path.parent
        )


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if "torch.backends" in line)


def test_the_parent_and_its_spawned_and_forked_children(installed: Python) -> None:
    out = lines(installed(JOBS, "children", REPLAY_PATCH="1"))

    assert out == [f"{who} True torch.backends" for who in ("fork", "parent", "spawn")]


def test_the_ranks_of_torchrun(installed: Python) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]

    out = lines(installed(*torchrun, "--master-port", "0", JOBS, "rank", REPLAY_PATCH="1"))

    assert out == ["rank0 True torch.backends", "rank1 True torch.backends"]


def test_a_ray_actor(installed: Python) -> None:
    out = lines(installed(JOBS, "actor", RAY_DISABLE_IMPORT_WARNING="1"))

    assert out == ["actor True torch.backends"]


def test_off_in_every_way_of_installing(installed: Python) -> None:
    code = "import sys, torch; print(sorted(m for m in sys.modules if m.startswith('replay_pa')))"

    done = installed("-c", code)

    assert done.stdout == "['replay_patch', 'replay_patch.autoload']\n"


def test_the_command_is_there(installed: Python) -> None:
    done = installed("-m", "replay_patch.cli", "--version")

    assert done.stdout == f"replay-patch {replay_patch.__version__}\n"


# --- what goes wrong --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Python:
    path = virtual_environments.make(tmp_path_factory.mktemp("plain"))
    virtual_environments.pip_install(path, str(wheel))
    return Python(path)


@pytest.mark.parametrize("value", ["0", "true"])
def test_torchs_autoload_switched_off_is_reported(python: Python, value: str) -> None:
    done = python(
        "-m", "replay_patch.cli", "doctor", REPLAY_PATCH="1", TORCH_DEVICE_BACKEND_AUTOLOAD=value
    )

    assert done.returncode == 1
    assert f"TORCH_DEVICE_BACKEND_AUTOLOAD='{value}' switches off torch's loading" in done.stdout
    assert "replay-patch run -- " in done.stdout


def test_torch_npu_imported_first(python: Python) -> None:
    """The real one switches torch's autoload off while it imports torch; so does the stand-in."""
    standins = {"REPLAY_PATCH": "1", "PYTHONPATH": STANDINS}
    code = (
        "torch_npu, torch, replay_patch; s = replay_patch.status(); "
        "print(s.active, s.trigger, *s.problems)"
    )

    alone = python("-c", f"import {code}", **standins)
    auto = python("-c", f"import replay_patch.auto, {code}", **standins)
    command = ["run", "--", str(python.path), "-c", f"import {code}"]
    run = python("-m", "replay_patch.cli", *command, **standins)

    assert alone.stdout.startswith("False None replay was asked for (REPLAY_PATCH), torch is impor")
    assert auto.stdout == "True replay_patch.auto\n"
    assert run.stdout == "True replay-patch run\n"


def test_a_stale_dist_info_in_front_is_reported(python: Python, tmp_path: Path) -> None:
    """Case D4: it hides the entry point."""
    stale = tmp_path / "replay_patch-0.0.1.dist-info"
    stale.mkdir()
    (stale / "METADATA").write_text("Metadata-Version: 2.1\nName: replay-patch\nVersion: 0.0.1\n")

    done = python("-m", "replay_patch.cli", "doctor", REPLAY_PATCH="1", PYTHONPATH=str(tmp_path))

    assert done.returncode == 1
    assert f"the replay-patch metadata at {stale} has no entry point" in done.stdout


def test_two_copies_on_the_path_are_reported(python: Python, wheel: Path, tmp_path: Path) -> None:
    virtual_environments.pip_install(
        Path(sys.executable), "--target", str(tmp_path / "second"), str(wheel)
    )

    done = python(
        "-m", "replay_patch.cli", "doctor", REPLAY_PATCH="1", PYTHONPATH=str(tmp_path / "second")
    )

    assert done.returncode == 1
    assert "replay-patch is installed more than once: " in done.stdout
    assert str(tmp_path / "second") in done.stdout


def test_a_broken_copy_of_us_leaves_torch_importable(python: Python, tmp_path: Path) -> None:
    (tmp_path / "wrapt.py").write_text("raise ImportError('a broken wrapt')")

    done = python(
        "-c", "import torch; print(torch.ones(1))", REPLAY_PATCH="1", PYTHONPATH=str(tmp_path)
    )

    assert done.stdout == "tensor([1.])\n"
    assert "a broken wrapt" in done.stderr
