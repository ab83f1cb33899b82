"""Routes on their way from verl's rollout servers to the batch, each release with its own code.

Each release has one process, which first does everything without the plugin, then activates it.
"""

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers import trainers

TRANSFORMERS_4 = {"transformers": "4.57.6", "huggingface-hub": "0.36.0", "datasets": "4.4.1"}
RELEASES: dict[str, dict[str, str]] = {
    "0.7.0": TRANSFORMERS_4,
    "0.7.1": {},
    "0.8.0": {},
    "0.9.1": {},
}
RESUMING = ("0.8.0", "0.9.1")

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "verl_router_replay.sh"


def example_arguments(verl: str) -> dict[str, list[str]]:
    """What the example gives to verl's main, for R2 and R3."""
    show = 'python3() { shift 2; printf \'%s\\n\' "$@"; }; exec() { "$@"; }; source "$0"'
    shown = {}
    for mode in ("R2", "R3"):
        command = ["bash", "-c", show, str(EXAMPLE), mode, "a-model", "train", "test"]
        env = {**os.environ, "VERL": verl}
        done = subprocess.run(command, env=env, text=True, capture_output=True, check=True)
        shown[mode] = done.stdout.splitlines()
    return shown


@functools.cache
def ask(verl: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        packages = {"verl": verl, **RELEASES[verl]}
        args = (folder, json.dumps(example_arguments(verl)))
        program = "programs.trainers.verl_rollout"
        return trainers.run(program, "0.16.1", packages, *args, plugin=False)


def expected_limit(prompt: int, given: int | None, spare: int) -> int:
    """Of a prompt of 10, a response of 20 and a context of 40 tokens."""
    wanted = min(20, 30 - prompt) if given is None else given
    return min(max(1, wanted), 40 - prompt - spare)


@pytest.fixture(params=RELEASES)
def answers(request: pytest.FixtureRequest) -> Any:
    return ask(request.param) | {"verl": request.param}


# --- what the patches are for -----------------------------------------------------------------


def test_without_the_plugin_tool_loops_lose_or_refuse_routes() -> None:
    assert ask("0.7.0")["without"]["tools"] == "absent"
    assert "must match the existing size" in ask("0.7.1")["without"]["truncated tools"]


def test_without_the_plugin_a_sample_without_routes_is_found_late_or_never(answers: Any) -> None:
    found = answers["without"]

    assert found["no routes"].startswith("TypeError")  # torch.cat
    assert found["first has none"] == "absent"  # of the whole batch, silently


def test_without_the_plugin_rows_are_put_at_wrong_tokens(answers: Any) -> None:
    """Nine rows for the nine generated tokens are put at the first nine of the prompt."""
    assert answers["without"]["new rows only"] == [[30, 0, 0, 9]]
    assert answers["without"]["in a thread, new rows only"] == [[17, 0, 0, 9]]


def test_without_the_plugin_resumed_generations_fail_or_shift_their_rows() -> None:
    assert "got numpy.ndarray" in ask("0.8.0")["without"]["resumed"]
    # 32 tokens have a row in some call; 23 are right, and 9 have another token's.
    assert ask("0.9.1")["without"]["a part without"] == [[33, 23, 0, 32]]


def test_without_the_plugin_a_response_grows_or_has_no_token() -> None:
    assert ask("0.7.0")["without"]["limits"]["vllm"][0] == 29  # of 20
    assert ask("0.7.1")["without"]["limits"]["vllm"][3] == 0
    assert ask("0.9.1")["without"]["limits"]["sglang"][3] == 0


@pytest.mark.parametrize("verl", ["0.7.1", "0.8.0"])
def test_without_the_plugin_a_token_without_a_row_gets_expert_255(verl: str) -> None:
    assert ask(verl)["without"]["unpadded"][2:] == [[255, 255]] * 2


# --- with the plugin --------------------------------------------------------------------------

LOOPS = (
    "single turn",
    "truncated",
    "tools",
    "truncated tools",
    "last turn without",
    "a turn without",
    "in a thread",
    "as tokenizers return prompts",
)
RESUMED = (
    "resumed",
    "a part without",
    "the last without",
    "resumed and cut",
    "resumed after filling",
)


@pytest.mark.parametrize("loop", LOOPS + RESUMED)
def test_each_token_has_its_own_row_or_none(answers: Any, loop: str) -> None:
    if loop in RESUMED and answers["verl"] not in RESUMING:
        pytest.skip(f"verl {answers['verl']} has no client that resumes")

    for tokens, right, without, captured in answers["with"][loop]:
        assert (right, without) == (captured, tokens - captured)
        assert captured > 0


def test_a_token_without_a_row_has_none_in_a_packed_batch_either(answers: Any) -> None:
    assert answers["with"]["unpadded"] == [[3, 4], [5, 255], [-1, -1], [-1, -1]]


@pytest.mark.parametrize("loop, sample", [("no routes", 1), ("first has none", 0)])
def test_a_sample_without_routes_is_one_error_that_names_it(
    answers: Any, loop: str, sample: int
) -> None:
    error = answers["with"][loop]

    assert error.startswith(
        f"RouteError: verl: step 3, sample_index {sample}, rollout_n 0: no token"
    )


def test_rows_that_are_not_of_all_tokens_are_refused(answers: Any) -> None:
    found = answers["with"]

    assert "9 rows of routed_experts for 21 prompt and 9 gen" in found["new rows only"]
    assert "returns 9 rows of routed_experts for 17 tokens" in found["in a thread, new rows only"]


def test_nothing_is_asked_of_a_rollout_without_replay_or_of_validation(answers: Any) -> None:
    assert answers["with"]["replay off"] == "absent"
    assert answers["with"]["validation"] == "absent"


def test_a_configuration_without_actor_rollout_ref_is_right_too() -> None:
    """0.7.1 takes one, with replay or without."""
    without, found = (ask("0.7.1")[way] for way in ("without", "with"))
    off, on = (f"config without actor_rollout_ref, {replay}" for replay in (False, True))

    assert found[off] == without[off] == [[24, 23, 0, 23]]
    assert found[on] == [[24, 23, 1, 23]]


def test_outputs_of_a_users_worker_and_loop_have_a_row_for_each_token(answers: Any) -> None:
    """Two outputs of one loop, which hands on no routes itself."""
    assert answers["with"]["a user's worker"] == [[11, 11], [16, 16]]


@pytest.mark.parametrize("server, spare", [("vllm", 0), ("sglang", 1)])
def test_a_response_has_one_to_response_length_tokens(
    answers: Any, server: str, spare: int
) -> None:
    asks = [
        (1, None),
        (10, None),
        (25, None),
        (30, None),
        (38, None),
        (5, 3),
        (5, 33),
        (5, 500),
        (5, 0),
    ]
    expected = [expected_limit(prompt, given, spare) for prompt, given in asks]

    assert answers["with"]["limits"][server] == expected


def test_a_prompt_is_counted_in_any_form_that_the_server_takes(answers: Any) -> None:
    if answers["verl"] == "0.7.0":
        pytest.skip("verl 0.7.0's server takes lists only")

    assert answers["with"]["limits"]["forms"] == [5, 5]


def test_patches_are_in_place_where_the_release_needs_them(answers: Any) -> None:
    needed = {
        "0.7.0": ("verl_max_tokens",),
        "0.7.1": ("verl_max_tokens", "verl_uncaptured_rows"),
        "0.8.0": ("verl_resumed_routes", "verl_uncaptured_rows"),
        "0.9.1": ("verl_resumed_routes",),
    }
    always = ("verl_rollout_routes", "verl_max_tokens_sglang")
    rollout = [*always, "verl_max_tokens", "verl_resumed_routes", "verl_uncaptured_rows"]

    for name in rollout:
        expected = name in always + needed[answers["verl"]]
        assert answers["patches"][name] == ("active" if expected else "not needed"), name


def test_workers_get_the_drivers_variables(answers: Any) -> None:
    assert [answers[way]["environment"] for way in ("without", "with")] == [None, "ERROR"]


def test_the_example_configures_both_modes(answers: Any) -> None:
    for mode, found in answers["example"].items():
        assert mode in found.pop("modes")
        assert found == {
            "rollout": mode == "R3",
            "packed": [True, True],
            "bypass": False,
            "environment": {"REPLAY_PATCH": "1"},
        }


def test_after_deactivation_verl_is_as_it_was(answers: Any) -> None:
    for loop, found in answers["off again"].items():
        assert found == answers["without"][loop]
