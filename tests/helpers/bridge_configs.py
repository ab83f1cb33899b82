"""Megatron-Bridge's config classes, all of them, asked whether they carry the fields."""

import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from helpers.bridge_questions import NAMES, error

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}


def classes() -> list[Any]:
    """Every subclass of Megatron's config that Megatron-Bridge's models define."""
    import megatron.bridge.models
    from megatron.core.transformer.transformer_config import TransformerConfig

    path, prefix = megatron.bridge.models.__path__, "megatron.bridge.models."
    for module in pkgutil.walk_packages(path, prefix):
        if not module.name.endswith("distillation_provider"):  # needs modelopt
            importlib.import_module(module.name)
    found: dict[Any, None] = {}
    waiting = [TransformerConfig]
    while waiting:
        waiting += (subs := waiting.pop().__subclasses__())
        found.update(dict.fromkeys(s for s in subs if s.__module__.startswith("megatron.bridge.")))
    return list(found)


def lacking() -> tuple[int, dict[str, dict[str, str]]]:
    """(number of classes, class -> way in which a field is lost -> how)."""
    asked = classes()
    answers = {cls.__qualname__: _lost(cls) for cls in asked}
    return len(asked), {name: lost for name, lost in answers.items() if lost}


def _lost(cls: Any) -> dict[str, str]:
    on = dict.fromkeys(NAMES, True)

    def late() -> Any:
        config = cls(**SIZES)
        for name in NAMES:
            setattr(config, name, True)
        return config

    def is_default() -> dict[str, bool]:
        return {name: getattr(cls(**SIZES), name) is False for name in NAMES}

    def is_field() -> dict[str, bool]:
        fields = {field.name: field for field in dataclasses.fields(cls)}
        return {name: fields[name].init and fields[name].type is bool for name in NAMES}

    ways: dict[str, Callable[[], Any]] = {
        "default": is_default,
        "field": is_field,
        "signature": lambda: {name: name in inspect.signature(cls).parameters for name in NAMES},
        "constructor": lambda: cls(**SIZES, **on),
        "attribute": late,
        "replace": lambda: dataclasses.replace(cls(**SIZES, **on), hidden_size=32),
        "replaced": lambda: dataclasses.replace(cls(**SIZES), **on),
        "asdict": lambda: dataclasses.asdict(cls(**SIZES, **on)),
        "bridge's asdict": lambda: getattr(cls, "asdict", dataclasses.asdict)(cls(**SIZES, **on)),
        "copy": lambda: copy.copy(late()),
        "deepcopy": lambda: copy.deepcopy(late()),
        "pickle": lambda: pickle.loads(pickle.dumps(cls(**SIZES, **on))),
    }
    return {way: wrong for way, made in ways.items() if (wrong := _wrong(made))}


def _wrong(made: Callable[[], Any]) -> str:
    got: list[Any] = []
    raised = error(lambda: got.append(made()))
    if raised:
        return raised
    values = got[0] if isinstance(got[0], dict) else vars(got[0])
    return ", ".join(name for name in NAMES if values.get(name) is not True)


def provider(**over: Any) -> Any:
    from megatron.bridge.models import GPTModelProvider

    return GPTModelProvider(**SIZES, **over)


def saved(model: Any) -> dict[str, Any]:
    """The fields of a config whose fields are all on, through Megatron-Bridge's files."""
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.utils.instantiate_utils import InstantiationMode

    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run_config.yaml")
        _container(model).to_yaml(str(path))
        for mode in InstantiationMode:
            read = ConfigContainer.from_yaml(str(path), mode=mode)
            out[mode.value] = _values(read.model)
        content = yaml.safe_load(path.read_text())
        out["yaml"] = [content["model"].pop(name) for name in NAMES]
        path.write_text(yaml.safe_dump(content))
        read = ConfigContainer.from_yaml(str(path), mode=InstantiationMode.STRICT)
        out["without"] = _values(read.model)
    out["overrides"] = _values(overridden(provider(), dict.fromkeys(NAMES, True)))
    return out


def overridden(model: Any, values: dict[str, bool]) -> Any:
    """By Megatron-Bridge's command line."""
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    overrides = [f"model.{name}={str(value).lower()}" for name, value in values.items()]
    return process_config_with_overrides(_container(model), cli_overrides=overrides).model


def _values(config: Any) -> list[Any]:
    return [getattr(config, name) for name in NAMES]


def _container(model: Any) -> Any:
    from megatron.bridge.training import config

    return config.ConfigContainer(
        train=config.TrainingConfig(train_iters=1, global_batch_size=1, micro_batch_size=1),
        model=model,
        optimizer=config.OptimizerConfig(),
        scheduler=config.SchedulerConfig(),
        ddp=config.DistributedDataParallelConfig(),
        dataset=config.FinetuningDatasetConfig(seq_length=8),
        logger=config.LoggerConfig(),
        tokenizer=config.TokenizerConfig(),
        checkpoint=config.CheckpointConfig(),
    )
