"""Processes of a user's job, which say whether the plugin is active in them.

python jobs.py children|rank|actor        # for tests/install/test_installation.py
"""

import importlib
import multiprocessing
import os
import sys

import torch  # isort: skip  (it activates the plugin)
import replay_patch

status = replay_patch.status()


def report(who: str) -> None:
    sys.stdout.write(f"{who} {status.active} {status.trigger}\n")
    sys.stdout.flush()


def children() -> None:
    """This process, a spawned and a forked one."""
    report("parent")
    for method in ("spawn", "fork"):
        child = multiprocessing.get_context(method).Process(target=report, args=(method,))  # type: ignore[attr-defined]
        child.start()
        child.join()


def rank() -> None:
    report("rank" + os.environ["RANK"])


def actor() -> None:
    import ray

    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"REPLAY_PATCH": "1"}},
    )

    @ray.remote
    class Actor:
        def state(self) -> str:
            importlib.import_module("torch")  # it activates the plugin there
            status = importlib.import_module("replay_patch").status()
            return f"actor {status.active} {status.trigger}"

    print(ray.get(Actor.remote().state.remote()))
    ray.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
