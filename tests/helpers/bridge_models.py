"""Models that Megatron-Bridge provides, tiny, built and replayed."""

import gc
from typing import Any

from helpers import bridge_questions
from helpers.bridge_questions import E, K
from megatron.bridge import AutoBridge
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction


def qwen3_moe(name: str | None, wrapped: bool = False) -> list[Any]:
    """With the flag set on the provider, as a user sets it; in Float16Module and DDP if wrapped."""
    provider = _provider(bridge_questions.qwen3_moe(), name)
    if not wrapped:
        return provider.provide_distributed_model(wrap_with_ddp=False)
    from megatron.bridge.training.config import DistributedDataParallelConfig

    return provider.provide_distributed_model(ddp_config=DistributedDataParallelConfig(), bf16=True)


def deepseek(name: str) -> list[Any]:
    """Multi-latent attention, a dense layer first, groups of experts."""
    from transformers import DeepseekV3Config

    over = {"num_hidden_layers": 3, "num_experts_per_tok": K, "n_routed_experts": E}
    over |= {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    over |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    over |= {"v_head_dim": 8, "num_key_value_heads": 4, "rope_theta": 10000.0}
    over |= {"scoring_func": "sigmoid"}  # as in its file
    hf_config = DeepseekV3Config(
        **bridge_questions.MOE | over, architectures=["DeepseekV3ForCausalLM"]
    )
    return _provider(hf_config, name).provide_distributed_model(wrap_with_ddp=False)


def qwen3_vl(name: str) -> Any:
    """The whole Qwen3-VL, vision included; its language model builds its decoder twice."""
    from transformers import Qwen3VLMoeConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 16, "deepstack_visual_indexes": [0], "patch_size": 4}
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    hf_config = Qwen3VLMoeConfig(
        text_config=bridge_questions.MOE | {"rope_parameters": rope},
        vision_config=vision | {"num_position_embeddings": 16},
        architectures=["Qwen3VLMoeForConditionalGeneration"],
        **{each: bridge_questions.VOCAB - 1 - i for i, each in enumerate(ids)},
    )
    [model] = _provider(hf_config, name).provide_distributed_model(wrap_with_ddp=False)
    return model


def _provider(hf_config: Any, name: str | None) -> Any:
    provider = AutoBridge.from_hf_config(hf_config).to_megatron_provider(load_weights=False)
    if name is not None:
        setattr(provider, name, True)
    # Kernels of Transformer Engine and apex.
    provider.moe_permute_fusion = provider.gradient_accumulation_fusion = False
    provider.finalize()
    return provider


def provided_alone(name: str) -> Any:
    """By `provide`, without what Megatron-Bridge puts around it."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider = _provider(bridge_questions.qwen3_moe(), name)
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return provider.provide(pre_process=True, post_process=True)


def with_lora(target_modules: list[str]) -> Any:
    from megatron.bridge.peft.lora import LoRA

    [model] = qwen3_moe("enable_routing_replay")
    return LoRA(target_modules=target_modules, dim=4, alpha=4)(model, training=True)


def lora_on_the_router() -> str:
    return bridge_questions.error(lambda: with_lora(["router"])(*bridge_questions.inputs()))


def decoder_built_twice() -> dict[str, Any]:
    """What a caller by position gets, with no garbage collection while and after building."""
    gc.collect()
    before = len(RouterReplay.global_router_replay_instances)
    gc.disable()
    model = qwen3_vl("moe_enable_routing_replay")
    listed = RouterReplay.global_router_replay_instances[before:]
    live = [router.router_replay for router in bridge_questions.routers(model)]
    given = [bridge_questions.other_ids(seed) for seed in range(len(live))]
    # The first routers of the model, as a caller that counts layers finds them.
    for entry, ids in zip(listed, given, strict=False):
        entry.set_target_indices(ids)
        entry.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    maps = bridge_questions.maps_of(model)
    gc.enable()
    return {
        "routers": len(live),
        "listed": [entry in live for entry in listed],
        "replayed": bridge_questions.equal(maps, [bridge_questions.as_map(ids) for ids in given]),
    }


def twice_by_session() -> dict[str, Any]:
    return bridge_questions.sessions(qwen3_vl("enable_routing_replay"))


def replayed() -> dict[str, Any]:
    """Each model by the API of Megatron 0.19, and in sessions."""
    out: dict[str, Any] = {}
    for name in bridge_questions.NAMES[:2]:
        [model] = qwen3_moe(name)
        out[name] = bridge_questions.low_level(model) | bridge_questions.sessions(model)
    del model
    [model] = deepseek("enable_routing_replay")
    out["deepseek"] = bridge_questions.low_level(model) | bridge_questions.sessions(model)
    del model
    model = with_lora(["linear_qkv", "linear_proj"])
    out["lora"] = bridge_questions.low_level(model) | bridge_questions.sessions(model)
    del model
    model = qwen3_moe("enable_routing_replay", wrapped=True)
    out["wrapped"] = bridge_questions.low_level(model[0]) | bridge_questions.sessions(model)
    # Megatron's DDP never dies once it has run, whoever lets it go.
    RouterReplay.clear_global_router_replay_instances()
    return out


def recomputed() -> list[bool]:
    """Full recompute: forwards and recomputes have the given maps, and the weights a gradient."""
    provider = _provider(bridge_questions.qwen3_moe(), "enable_routing_replay")
    provider.recompute_granularity, provider.recompute_method = "full", "uniform"
    provider.recompute_num_layers = 1
    [model] = provider.provide_distributed_model(wrap_with_ddp=False)
    live = [router.router_replay for router in bridge_questions.routers(model)]
    given = [bridge_questions.other_ids(seed) for seed in range(len(live))]
    RouterReplay.set_replay_data(given)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with bridge_questions.noted(model) as maps:
        loss = model(*bridge_questions.inputs(), labels=bridge_questions.inputs()[0]).sum()
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        loss.backward()
    wanted = [bridge_questions.as_map(ids) for ids in given]
    found = bridge_questions.equal(maps, wanted + wanted[::-1])
    return [
        *found,
        all(bool(r.weight.grad.abs().sum() > 0) for r in bridge_questions.routers(model)),
    ]
