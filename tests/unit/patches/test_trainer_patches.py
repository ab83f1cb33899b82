"""A trainer's patch goes away by itself: it is not needed by code that does not have its fault.

The code here is as short as can be, with the fault and without it; whether the real releases have
it is asked of these, in tests/trainers.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

VERL = "verl.utils.megatron"
VLLM = "verl.workers.rollout.vllm_rollout.vllm_async_server"
SGLANG = "verl.workers.rollout.sglang_rollout.async_sglang_server"
SKYRL = "skyrl.backends.skyrl_train.utils.replay_utils"

SERVER = """
class {name}:
    async def generate(self, prompt_ids, sampling_params, request_id):
        config = self.config
        left = config.prompt_length + config.response_length - len(prompt_ids)
        return {request}(max_tokens={limit})
"""
PASS = """
class {cls}:
    def forward_backward_batch(self, data):
        try:
            return self.run(data)
        {word}:
            RouterReplay.clear_global_router_replay_action()
"""
ENVIRONMENT = """
def {name}({argument}):
    return {made}
"""


@dataclass(frozen=True)
class Case:
    patch: str
    module: str
    faulty: str
    right: str


def case(patch: str, module: str, text: str, faulty: object, right: object) -> Case:
    """Two texts that differ in one place, which is named in `text`."""
    fields = [each if isinstance(each, dict) else {"it": each} for each in (faulty, right)]
    return Case(patch, module, *(text.format(**each) for each in fields))


CASES = [
    case(
        "verl_router_replay",
        f"{VERL}.router_replay_patch",
        "def apply_router_replay_patch():\n    {it}\n",
        "TopKRouter.routing = None",
        "return RouterReplay",
    ),
    case(
        "verl_router_lists",
        f"{VERL}.router_replay_utils",
        "class RouterReplayHelper:\n    @staticmethod\n"
        "    def get_micro_batch_router_list(tf_config, vp_rank=None):\n        return {it}\n",
        "RouterReplay.router_instances[:2]",
        "by_layer(tf_config, vp_rank)",
    ),
    case(
        "verl_wide_ids",
        f"{VERL}.router_replay_utils",
        "def merge_router_topk_indices(ids):\n    return ids.to(torch.{it})\n",
        "uint8",
        "int16",
    ),
    case(
        "verl_packing",
        f"{VERL}.router_replay_utils",
        "def {it}(ids):\n    return ids, None, None\n"
        "def merge_router_topk_indices(ids):\n"
        "    packed, _ = preprocess_thd_no_padding(ids)\n",
        "preprocess_thd_no_padding",
        "preprocess_thd_engine",
    ),
    case(
        "verl_uncaptured_rows",
        "verl.workers.utils.padding",
        "def left_right_2_no_padding(data):\n    return data.to(torch.{it})\n",
        "uint8",
        "int16",
    ),
    case(
        "verl_replay_config",
        "verl.utils.config",
        "def validate_config(config):\n    return config.{it}\n",
        "router_replay",
        "enable_rollout_routing_replay",
    ),
    case(
        "verl_actor_pass",
        "verl.workers.actor.megatron_actor",
        PASS,
        {"cls": "MegatronPPOActor", "word": "except ValueError"},
        {"cls": "MegatronPPOActor", "word": "finally"},
    ),
    case(
        "verl_rollout_routes",
        "verl.experimental.agent_loop.agent_loop",
        "class AgentLoopOutput:\n    model_fields = {{'routed_experts': 1, {it}: 1}}\n",
        "'metrics'",
        "'routed_experts_mask'",
    ),
    case(
        "verl_resumed_routes",
        "verl.workers.rollout.llm_server",
        "class FullyAsyncLLMServerClient:\n    async def generate(self):\n        self.{it}\n",
        "routed_experts",
        "by_token",
    ),
    case(
        "verl_max_tokens",
        VLLM,
        SERVER,
        {"name": "vLLMHttpServer", "request": "SamplingParams", "limit": "left"},
        {
            "name": "vLLMHttpServer",
            "request": "SamplingParams",
            "limit": "max(1, min(config.response_length, left))",
        },
    ),
    case(
        "verl_max_tokens_sglang",
        SGLANG,
        SERVER,
        {"name": "SGLangHttpServer", "request": "GenerateReqInput", "limit": "max(0, left)"},
        {
            "name": "SGLangHttpServer",
            "request": "GenerateReqInput",
            "limit": "max(1, min(config.response_length, left))",
        },
    ),
    case(
        "verl_environment",
        "verl.trainer.constants_ppo",
        "import os\ndef get_ppo_ray_runtime_env():\n"
        "    return {{'env_vars': {{k: '1' for k in os.environ if k.startswith({it})}}}}\n",
        "'NCCL_'",
        "('NCCL_', 'REPLAY_')",
    ),
    case(
        "skyrl_environment",
        "skyrl.train.utils.utils",
        "def prepare_runtime_environment(cfg):\n    return {it}\n",
        "{}",
        "forwarded('REPLAY_PATCH')",
    ),
    case(
        "skyrl_expert_bias",
        SKYRL,
        "def {it}():\n    pass\n",
        "patch_topk_router_expert_bias_padding_mask",
        "something_else",
    ),
    case(
        "skyrl_replay_setup",
        SKYRL,
        "def _split_replay_indices(ids):\n    return [{it}]\n"
        "def setup_per_microbatch_replay_forward(\n"
        "    rollout_expert_indices, attention_mask, model_config, remove_microbatch_padding\n"
        "):\n    pass\n",
        "ids",
        "ids.transpose(0, 1)",
    ),
    case(
        "skyrl_lost_routes",
        "skyrl.train.trainer",
        "class RayPPOTrainer:\n    def convert_to_training_input(self, output):\n"
        "        return output.get({it})\n",
        "'rollout_expert_indices'",
        "'routes'",
    ),
    case(
        "skyrl_missing_routes",
        "skyrl.train.dataset.preprocess",
        "def convert_prompts_responses_to_batch_tensors(loss_masks, {it}=None):\n    pass\n",
        "rollout_expert_indices",
        "routes",
    ),
    case(
        "skyrl_sampling",
        "skyrl.train.utils.trainer_utils",
        "def filter_generator_output(output, kept):\n"
        "    return {{k: v and [v[i] for i in kept] for k, v in output.items() if {it}}}\n"
        "def handle_replace_sampling(output):\n    output['rollout_expert_indices']\n",
        "k in ('response_ids', 'rewards')",
        "True",
    ),
]


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """`needed` of a patch, asked of a module with this text."""

    def ask(patch: str, module: str, text: str) -> bool:
        path = tmp_path / f"{patch}_{len(text)}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(module, path)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        monkeypatch.setitem(sys.modules, module, made)
        found = importlib.import_module(
            f"replay_patch.patches.{patch.partition('_')[0]}.{patch}"
        ).PATCH.needed()
        assert found[1]
        return found[0]

    return ask


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.patch)
def test_a_patch_is_needed_where_the_fault_is_and_nowhere_else(case: Case, probe: object) -> None:
    assert probe(case.patch, case.module, case.faulty)
    assert not probe(case.patch, case.module, case.right)


@pytest.mark.parametrize("word, formats", [("finally", False), ("except ValueError", True)])
def test_verls_engine_is_left_alone_when_it_clears_and_knows_padded_rows(
    word: str, formats: bool, probe: object
) -> None:
    module = "verl.workers.engine.megatron.transformer_impl"
    utils = f"{VERL}.router_replay_utils"
    text = "def set_router_replay_data(ids{}):\n    pass\n"
    engine = {"cls": "MegatronEngine", "word": word}
    probe("verl_wide_ids", utils, text.format(", data_format" if formats else ""))

    assert probe("verl_engine_pass", module, PASS.format(**engine))

    probe("verl_wide_ids", utils, text.format(", data_format"))
    assert not probe("verl_engine_pass", module, PASS.format(**{**engine, "word": "finally"}))


def test_a_comment_is_no_finally(probe: object) -> None:
    actor = {"cls": "MegatronPPOActor", "word": "except ValueError:  # finally"}

    assert probe("verl_actor_pass", "verl.workers.actor.megatron_actor", PASS.format(**actor))


def test_an_environment_that_only_names_our_variables_lacks_them(probe: object) -> None:
    text = "def get_ppo_ray_runtime_env():\n    'REPLAY_PATCH'\n    return {'env_vars': {}}\n"

    assert probe("verl_environment", "verl.trainer.constants_ppo", text)
