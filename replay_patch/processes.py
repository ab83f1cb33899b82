"""The environment of the processes that run on a Megatron of the user's choice."""

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["environ"]

_PACKAGE_PARENT = Path(__file__).absolute().parents[1]


def environ(folders: Sequence[str | os.PathLike[str]] = ()) -> dict[str, str]:
    """The caller's variables, with the plugin on and `folders` found first.

    `REPLAY_PATCH_SKIP` and other settings of the caller stay. This package comes after the caller's
    own path: what hides it from a job must hide it here, too.
    """
    path = [os.path.abspath(folder) for folder in folders]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path += [os.path.abspath(entry) for entry in inherited if entry]
    if _PACKAGE_PARENT.name not in ("site-packages", "dist-packages"):  # on every path already
        path.append(str(_PACKAGE_PARENT))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "REPLAY_PATCH": "1",
        # A row that repeats an expert routes natively, and is an error under STRICT.
        "REPLAY_PATCH_STRICT": "0",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "CUDA_VISIBLE_DEVICES": "",  # Megatron asks whether there is a GPU, and would use it
        "OMP_NUM_THREADS": "1",  # a forked child of a process with OpenMP threads hangs
    }
