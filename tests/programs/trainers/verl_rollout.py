"""Rollouts of one verl release, without the plugin and with it.

    python -m programs.trainers.verl_rollout FOLDER EXAMPLE

For tests/trainers/test_verl_rollout.py. EXAMPLE is what the example of docs/examples gives to
verl's main, {"R2": [...], "R3": [...]}, as JSON. It stays one script: Ray takes the classes of
`__main__` by value, and the engines come before verl.
"""

import asyncio
import functools
import inspect
import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

from standins import rollout_engines

rollout_engines.install()
from helpers.verl_rollout import (
    RESPONSE_LENGTH,
    TOOL_CALL,
    Answer,
    Engine,
    batch,
    compared,
    config,
    model,
    resuming_client,
    routes,
    worker,
)

logging.disable(logging.WARNING)
sleep = asyncio.sleep
asyncio.sleep = lambda seconds: sleep(0)  # verl waits a second before it resumes

FOLDER = sys.argv[1]
EXAMPLE = json.loads(sys.argv[2])

# Which module of verl comes first is not all the same.
# isort: off
import ray
from ray import cloudpickle
from verl.trainer import main_ppo
from transformers import AutoTokenizer
from verl.experimental.agent_loop import agent_loop
from verl.workers.rollout.sglang_rollout import async_sglang_server as sglang_server
from verl.workers.rollout.vllm_rollout import vllm_async_server as vllm_server

# isort: on

folder = model(Path(FOLDER))
tokenizer = AutoTokenizer.from_pretrained(folder)
TOOL, ONE = "tool_agent", "single_turn_agent"
LONG = "z" * (RESPONSE_LENGTH + 20)
LOOPS = {
    "single turn": (ONE, [[Answer("one")], [Answer("all rows", "all")]]),
    "truncated": (ONE, [[Answer(LONG)], [Answer("short")]]),
    "tools": (TOOL, [[Answer(TOOL_CALL), Answer("done")], [Answer("no tool")]]),
    "truncated tools": (TOOL, [[Answer(TOOL_CALL), Answer(LONG)]]),
    "last turn without": (TOOL, [[Answer(TOOL_CALL), Answer("done", "none")]]),
    "a turn without": (TOOL, [[Answer(TOOL_CALL, "none"), Answer("done")]]),
    "no routes": (ONE, [[Answer("one")], [Answer("two", "none")], [Answer("three")]]),
    "first has none": (ONE, [[Answer("one", "none")], [Answer("two")]]),
    "new rows only": (ONE, [[Answer("generated", "new")]]),
    "in a thread": ("in a thread", [[Answer("one")]]),
    "in a thread, new rows only": ("in a thread", [[Answer("generated", "new")]]),
    "as tokenizers return prompts": ("tokenizer", [[Answer("one")]]),
}
PART = functools.partial(Answer, stop="aborted")
RESUMED = {
    "resumed": [[PART("abc"), PART(""), Answer("defg")], [Answer("whole")]],
    "a part without": [[PART("abc"), PART("defgh", "none"), PART("ij"), Answer("kl")]],
    "the last without": [[PART("abc"), Answer("defgh", "none")]],
    "resumed and cut": [[PART("abc"), Answer(LONG)]],
    "resumed after filling": [[PART("abc", "all"), PART("", "empty"), Answer("defg")]],
}


def run(agent, answers, *, replay=True, flat=False, validate=False, **options):
    async def rollout():
        of = worker(config(folder, replay, flat), engine, **options)
        return await of.generate_sequences(batch(len(answers), agent, validate))

    engine = Engine(tokenizer, answers)
    try:
        return compared(asyncio.run(rollout()), engine)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Own(getattr(agent_loop, "AgentLoopWorkerBase", agent_loop.AgentLoopWorker)):
    """A user's worker; it does with outputs what verl's for transfer queues does."""

    async def _agent_loop_postprocess(self, output, *args, **kwargs):
        self.seen = [
            [len(one.prompt_ids) + len(one.response_ids), len(one.routed_experts)]
            for one in output
            if one is not None
        ]

    async def generate_sequences(self, batch):
        loop = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
        await self._run_agent_loop({}, loop, agent_name="two outputs", trace=False, **batch)
        return self.seen


own_actor = ray.remote(Own).__ray_metadata__.modified_class  # made before the plugin is there


class TwoOutputs(agent_loop.AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        outputs = []
        for text in "#0 first", "#0 and second":
            ids = tokenizer.encode(text, add_special_tokens=False)
            got = await self.server_manager.generate(
                request_id="1", prompt_ids=ids, sampling_params=sampling_params
            )
            outputs.append(
                agent_loop.AgentLoopOutput(
                    prompt_ids=ids,
                    response_ids=got.token_ids,
                    response_mask=[1] * len(got.token_ids),
                    metrics=agent_loop.AgentLoopMetrics(),
                    num_turns=1,
                    extra_fields={},
                )
            )
        return outputs


class InAThread(agent_loop.AgentLoopBase):
    """It hands on the engine's rows, of calls that no task of verl's makes."""

    async def run(self, sampling_params, **kwargs):
        loop, ids = asyncio.get_running_loop(), tokenizer.encode("#0 hello")

        def call() -> Any:
            coroutine = self.server_manager.generate(
                request_id="1", prompt_ids=ids, sampling_params=sampling_params
            )
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

        got = await loop.run_in_executor(None, call)
        return agent_loop.AgentLoopOutput(
            prompt_ids=ids,
            response_ids=got.token_ids,
            response_mask=[1] * len(got.token_ids),
            routed_experts=got.routed_experts,
            metrics=agent_loop.AgentLoopMetrics(),
            num_turns=1,
            extra_fields={},
        )


class Tokenizer(agent_loop.AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt = tokenizer("#0 hello")
        got = await self.server_manager.generate(
            request_id="1", prompt_ids=prompt, sampling_params=sampling_params
        )
        return agent_loop.AgentLoopOutput(
            prompt_ids=prompt["input_ids"],
            response_ids=got.token_ids,
            response_mask=[1] * len(got.token_ids),
            routed_experts=got.routed_experts,
            metrics=agent_loop.AgentLoopMetrics(),
            num_turns=1,
            extra_fields={},
        )


OF_USERS = {"two outputs": TwoOutputs, "in a thread": InAThread, "tokenizer": Tokenizer}
for name, cls in OF_USERS.items():
    agent_loop._agent_loop_registry[name] = {"_target_": f"__main__.{cls.__name__}"}


def of_a_user():
    async def rollout():
        of = worker(config(folder), engine, cls=own_actor)
        return await of.generate_sequences({"raw_prompt": []})

    engine = Engine(tokenizer, [[Answer("one"), Answer("two")]])
    try:
        return asyncio.run(rollout())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


LENGTHS = {"prompt_length": 10, "response_length": 20, "max_model_len": 40}


def asked(module, name, request, prompt, given):
    cls = getattr(module, name)
    metadata = getattr(cls, "__ray_metadata__", None)
    cls = metadata.modified_class if metadata else cls
    generate = cloudpickle.loads(cloudpickle.dumps(cls.generate))  # as Ray brings it to a server
    settings = types.SimpleNamespace(
        **LENGTHS,
        enable_rollout_routing_replay=True,
        full_determinism=False,
        get=lambda key, default=None: default,
    )
    server = object.__new__(cls)
    for key, value in {"config": settings, "_disaggregation_role": None}.items():
        setattr(server, key, value)
    made = getattr(module, request).made
    made.clear()
    try:
        generate(server, prompt, dict(given), "id").send(None)
    except Exception as error:
        if not made:
            return f"{type(error).__name__}: {error}"
    got = made[-1].get("sampling_params", made[-1])
    return got.get("max_tokens", got.get("max_new_tokens"))


def limits():
    asks = [
        (1, {}),
        (10, {}),
        (25, {}),
        (30, {}),
        (38, {}),
        (5, {"max_tokens": 3}),
        (5, {"max_new_tokens": 33}),
        (5, {"max_tokens": 500}),
        (5, {"max_tokens": 0}),
    ]
    servers = {
        "vllm": (vllm_server, "vLLMHttpServer", "SamplingParams"),
        "sglang": (sglang_server, "SGLangHttpServer", "GenerateReqInput"),
    }
    out = {
        key: [asked(*server, [5] * prompt, given) for prompt, given in asks]
        for key, server in servers.items()
    }
    prompts = [[5] * 25], {"input_ids": [5] * 25}
    return out | {"forms": [asked(*servers["vllm"], prompt, {}) for prompt in prompts]}


def unpadded():
    """Routes of four tokens, the last two without, on their way to a packed microbatch."""
    import torch
    from tensordict import TensorDict
    from verl.utils import attention_utils
    from verl.workers.utils import padding

    try:
        from verl.utils import npu_flash_attn_utils as torch_only
    except ImportError:  # 0.9: it asks by itself
        pass
    else:
        names = "index_first_axis", "pad_input", "rearrange", "unpad_input"
        functions = [getattr(torch_only, name) for name in names]
        attention_utils._get_attention_functions = lambda: functions
    four = torch.arange(4)[None]
    rows = torch.tensor([[[[3, 4]], [[5, 255]], [[-1, -1]], [[-1, -1]]]], dtype=torch.int16)
    batch = TensorDict(
        {
            "input_ids": four,
            "position_ids": four,
            "attention_mask": torch.ones_like(four),
            "response_mask": torch.ones(1, 2),
            "routed_experts": rows,
        },
        batch_size=[1],
    )
    found = padding.left_right_2_no_padding(batch)["routed_experts"]
    return (found.values() if found.is_nested else found[0])[:, 0].tolist()


def environment():
    return main_ppo.get_ppo_ray_runtime_env()["env_vars"].get("REPLAY_PATCH_LOG")


def everything():
    out = {name: run(*case) for name, case in LOOPS.items()}
    out["replay off"] = run(ONE, [[Answer("one", "none")]], replay=False)
    others = [[Answer("one", "none")], [Answer("two")], [Answer("three", "new")]]
    out["validation"] = run(ONE, others, validate=True)
    out["a user's worker"] = of_a_user()
    if hasattr(agent_loop, "_get_rollout_and_model_config"):  # 0.7.1
        for replay in (False, True):
            out[f"config without actor_rollout_ref, {replay}"] = run(
                ONE, [[Answer("one")]], replay=replay, flat=True
            )
    out["limits"] = limits()
    out["environment"] = environment()
    out["unpadded"] = unpadded()
    if resuming_client() is not None:
        for name, answers in RESUMED.items():
            out[name] = run(ONE, answers, resuming=True)
    return out


os.environ["REPLAY_PATCH_LOG"] = "ERROR"
answers = {"without": everything()}
import replay_patch

replay_patch.activate()
answers["with"] = everything()
answers["patches"] = {
    p.name: p.state for p in replay_patch.status().patches if p.name.startswith("verl_")
}
replay_patch.deactivate()
answers["off again"] = {name: run(*LOOPS[name]) for name in ("single turn", "no routes")}


def example(arguments):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    path = Path(main_ppo.__file__).parent / "config"
    [named] = [each for each in arguments if each.startswith("--config-name=")]
    overrides = [each for each in arguments if not each.startswith("--")]
    with initialize_config_dir(str(path), version_base=None):
        made = compose(named.partition("=")[2], overrides=overrides)
    actor = made.actor_rollout_ref.actor
    return {
        "modes": [
            place.router_replay.mode
            for place in (actor, actor.megatron)
            if place.get("router_replay") is not None
        ],
        "rollout": made.actor_rollout_ref.rollout.enable_rollout_routing_replay,
        "packed": [
            place.use_remove_padding for place in (actor.megatron, made.actor_rollout_ref.model)
        ],
        "bypass": made.algorithm.rollout_correction.bypass_mode,
        "environment": OmegaConf.to_container(made.ray_kwargs.ray_init.runtime_env.env_vars),
    }


answers["example"] = {mode: example(arguments) for mode, arguments in EXAMPLE.items()}
print(json.dumps(answers))
