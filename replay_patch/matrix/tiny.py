"""Tiny MoE models of a real Megatron-core on the CPU bed, and the processes they run in.

    tiny.init()                                    # gloo and Megatron's groups, one process
    model = tiny.gpt_model(tiny.moe_config())      # 2 layers, 4 experts, top 2, hidden size 16
    tiny.shutdown()

Each function installs the CPU bed if that has not been done. More ranks: `launch`.
"""

import dataclasses
import inspect
import sys
from typing import Any

from replay_patch.matrix import cpu
from replay_patch.matrix.ranks import init, launch, shutdown

__all__ = [
    "VPP_P2P",
    "clear_aux_tracker",
    "gpt_model",
    "init",
    "launch",
    "model_chunks",
    "moe_config",
    "moe_groups",
    "moe_layer",
    "router",
    "shutdown",
]

VOCAB_SIZE, MAX_SEQUENCE_LENGTH = 64, 64

# Pipeline size 2 with virtual stages has two sends and two receives between two ranks in one batch.
# batch_p2p_comm (the default) can match them the wrong way round: wrong activations, and no error,
# from the third microbatch on. megatron.training refuses that, megatron.core does not. These flags
# choose the ordered path.
VPP_P2P = {"overlap_p2p_comm": True, "batch_p2p_comm": False}


def moe_config(config_class: Any = None, **over: Any) -> Any:
    """The config of a tiny fp32 MoE that a CPU can run.

    Args:
        config_class: TransformerConfig if None, else e.g. MLATransformerConfig.
        over: fields that differ. One that the release lacks raises its own TypeError; only the
            defaults here are dropped where a release lacks them.
    """
    _prepare()
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    config_class = config_class or TransformerConfig
    defaults = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "ffn_hidden_size": 32,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
    }
    known = {field.name for field in dataclasses.fields(config_class)}
    return config_class(**{k: v for k, v in defaults.items() if k in known} | over)


def gpt_model(
    config: Any, *, seed: int | None = 7, torch_attention: bool | None = None, **kwargs: Any
) -> Any:
    """A GPTModel of the local backend, with the MTP block and the dense layers `config` asks for.

    Args:
        seed: of torch's generator just before the weights are drawn; None leaves it alone.
        torch_attention: use `TorchAttention`; None: where Megatron's does not do (MLA, context
            parallelism, MindSpeed's NPU kernel). Packed sequences need True.
        kwargs: of GPTModel. `vp_stage` is dropped where the release takes none (0.12).
    """
    _prepare()
    import torch
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    from replay_patch.matrix.attention import with_torch_attention

    if torch_attention is None:
        torch_attention = (
            config.multi_latent_attention
            or config.context_parallel_size > 1
            or "mindspeed" in sys.modules
        )
    vp_stage = {"vp_stage": kwargs.get("vp_stage")}
    if config.moe_layer_freq == 1:
        spec = _layer_spec(config)
        if torch_attention:
            spec = with_torch_attention(spec)
    else:  # some layers are dense
        make = gpt_layer_specs.get_gpt_decoder_block_spec
        options = _accepted(make, {"normalization": config.normalization, **vp_stage})
        spec = make(config, use_transformer_engine=False, **options)
        if torch_attention:
            spec.layer_specs = [with_torch_attention(layer) for layer in spec.layer_specs]
    if config.mtp_num_layers and "mtp_block_spec" not in kwargs:
        make = gpt_layer_specs.get_gpt_mtp_block_spec
        options = _accepted(make, vp_stage)
        last = spec.layer_specs[-1] if hasattr(spec, "layer_specs") else spec
        kwargs["mtp_block_spec"] = make(config, last, use_transformer_engine=False, **options)
    if "vp_stage" not in inspect.signature(GPTModel.__init__).parameters:
        kwargs.pop("vp_stage", None)
    arguments: dict[str, Any] = {
        "transformer_layer_spec": spec,
        "vocab_size": VOCAB_SIZE,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
        "position_embedding_type": "rope",
    }
    if seed is not None:
        torch.manual_seed(seed)
    return GPTModel(config=config, **arguments | kwargs)


def model_chunks(config: Any, **kwargs: Any) -> list[Any]:
    """This pipeline rank's models: one, or one per virtual stage. ValueError for p2p flags with
    which virtual stages finish with wrong numbers (see `VPP_P2P`)."""
    _prepare()
    from megatron.core import parallel_state

    stages = config.virtual_pipeline_model_parallel_size
    if stages is None:
        first = parallel_state.is_pipeline_first_stage()
        last = parallel_state.is_pipeline_last_stage()
        return [gpt_model(config, pre_process=first, post_process=last, **kwargs)]
    if config.batch_p2p_comm and config.pipeline_model_parallel_size == 2:
        raise ValueError(
            "model_chunks: pipeline size 2 with virtual stages and batch_p2p_comm=True computes "
            "wrong activations without an error; build the config with **VPP_P2P"
        )
    chunks = []
    for stage in range(stages):
        if hasattr(parallel_state, "set_virtual_pipeline_model_parallel_rank"):
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        where = {"ignore_virtual": False, "vp_stage": stage}
        first = _with_accepted(parallel_state.is_pipeline_first_stage, where)
        last = _with_accepted(parallel_state.is_pipeline_last_stage, where)
        kwargs.update(pre_process=first, post_process=last, vp_stage=stage)
        chunks.append(gpt_model(config, **kwargs))
    return chunks


def moe_layer(config: Any, layer_number: int = 1) -> Any:
    """A stand-alone MoELayer: router, dispatcher and experts. Needs `init()` first."""
    _prepare()
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    spec = _layer_spec(config).submodules.mlp
    groups = moe_groups(MoELayer)
    if isinstance(spec, ModuleSpec):
        layer = build_module(spec, config=config, **groups)
    else:  # from 0.17 on a functools.partial
        layer = spec(config=config, **groups)
    layer.set_layer_number(layer_number)
    return layer


def router(config: Any, layer_number: int = 1) -> Any:
    """A stand-alone TopKRouter. Needs `init()` first, from 0.13 on."""
    _prepare()
    from megatron.core.transformer.moe.router import TopKRouter

    built = TopKRouter(config=config, **moe_groups(TopKRouter))
    built.set_layer_number(layer_number)
    return built


def moe_groups(cls: Any) -> dict[str, Any]:
    """The process-group argument of a router or MoE layer class; {} for 0.12, which has none."""
    _prepare()
    from megatron.core.transformer.moe import moe_utils

    parameters = inspect.signature(cls.__init__).parameters
    if "pg_collection" in parameters:  # from 0.15 on
        return {"pg_collection": moe_utils.get_default_pg_collection()}
    if "model_comm_pgs" in parameters:  # 0.13, 0.14
        return {"model_comm_pgs": moe_utils.get_default_model_comm_pgs()}
    return {}


def clear_aux_tracker() -> None:
    """Forget what Megatron's aux losses keep in process globals; call it between two models. The
    first one sizes the tracker: another with more layers (or MTP) ends in an IndexError. A backward
    outside a schedule leaves a loss scale whose shape the next schedule cannot copy into."""
    _prepare()
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    for holder in (parallel_state, moe_utils):  # 0.12; 0.13 to 0.17
        tracker = getattr(holder, "_MOE_LAYER_WISE_LOGGING_TRACKER", None)
        if tracker is not None:
            tracker.clear()
    try:
        from megatron.core.transformer.moe import moe_logging  # from 0.18 on
    except ImportError:
        return
    moe_logging._MOE_METRICS_TRACKER = None


def _prepare() -> None:
    cpu.install_once()
    import megatron.core  # noqa: F401

    cpu.patch_megatron()


def _layer_spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        normalization=config.normalization,
        multi_latent_attention=config.multi_latent_attention,
    )


def _accepted(function: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options that this release's function has a parameter for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


def _with_accepted(function: Any, options: dict[str, Any]) -> Any:
    return function(**_accepted(function, options))
