"""Processes that run on a Megatron of the user's choice: their variables, and what they say."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import replay_patch
from replay_patch import processes


def test_the_folders_come_first_then_the_callers_path_then_this_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Last, so that a stale dist-info of ours that hides the plugin from a job (case D4) hides it
    here, too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/theirs", ""]))

    path = processes.environ(["/megatron"])["PYTHONPATH"].split(os.pathsep)

    parent = Path(replay_patch.__file__).absolute().parents[1]
    installed = parent.name in ("site-packages", "dist-packages")
    assert path == ["/megatron", "/theirs", *([] if installed else [str(parent)])]


def test_the_plugin_is_on_whatever_the_caller_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 94, and the settings of the caller that are not about that."""
    monkeypatch.setenv("REPLAY_PATCH", "0")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("REPLAY_PATCH_SKIP", "mtp_depth")

    environ = processes.environ()

    assert environ["REPLAY_PATCH"] == environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"
    assert environ["REPLAY_PATCH_SKIP"] == "mtp_depth"


# --- children ---------------------------------------------------------------------------------


@pytest.fixture
def talker(tmp_path: Path) -> Callable[..., Any]:
    """Make a module of some code, and give what `processes.child` takes to run it."""

    def made(code: str) -> Any:
        (tmp_path / "talker.py").write_text(f"import os, sys, time\n{code}\n")
        path = [str(tmp_path), str(Path(replay_patch.__file__).parents[1])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "REPLAY_PATCH": "0"}
        return processes.child("talker", env=env)

    return made


MESSAGES = """
from replay_patch.processes import parents_stdout
out = parents_stdout()
"""


def test_messages_come_in_order_and_what_is_printed_is_kept_apart(talker: Any) -> None:
    noise = "print('noise', flush=True); print(file=sys.stderr); print('last', file=sys.stderr)\n"
    code = MESSAGES + noise + "print('{\"n\": 1}', '{\"n\": 2}', sep='\\n', file=out)"

    with talker(f"print('no message', flush=True); print(3, flush=True)\n{code}") as child:
        messages = [child.next_message(60) for _ in range(3)]

    assert messages == [{"n": 1}, {"n": 2}, None]
    assert child.exit_code == 0
    assert sorted(child.last_lines()) == ["3", "last", "no message", "noise"]
    assert child.last_lines(1) in (["last"], ["noise"])


def test_a_message_whose_writer_died_in_the_middle_is_none(talker: Any) -> None:
    with talker(MESSAGES + "out.write('{\"n\"'); out.flush(); os._exit(3)") as child:
        assert child.next_message(60) is None

    assert (child.exit_code, child.last_lines()) == (3, [])


def test_a_process_that_says_nothing_is_stopped_in_time(talker: Any) -> None:
    with talker("time.sleep(600)") as child, pytest.raises(TimeoutError):
        child.next_message(0.2)

    assert child.exit_code == -signal.SIGTERM


def test_an_exception_in_the_block_ends_the_process_and_leaves_no_file(talker: Any) -> None:
    code = "import tempfile\nfolder = tempfile.mkdtemp()\n" + MESSAGES
    code += "import json; print(json.dumps({'folder': folder}), file=out)\ntime.sleep(600)"

    with pytest.raises(KeyboardInterrupt), talker(code) as child:  # noqa: PT012
        message = child.next_message(60)
        assert Path(message["folder"]).is_dir()
        raise KeyboardInterrupt

    assert child.exit_code == -signal.SIGTERM
    assert not Path(message["folder"]).parent.exists()


def test_what_a_process_leaves_behind_does_not_keep_its_parent_waiting(talker: Any) -> None:
    code = MESSAGES + "import subprocess; subprocess.Popen(['sleep', '20'])"

    started = time.monotonic()
    with talker(code) as child:
        assert child.next_message(60) is None

    assert time.monotonic() - started < 15
