"""For tests/release/megatron/test_config_fields.py: classes made before the plugin is there."""

import dataclasses
from types import SimpleNamespace
from typing import Any

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


def made_before() -> list[list[bool]]:
    """[with replay, with a fused router, without replay] of each class, and of one with its own
    default [as it is, switched off]."""
    classes = _classes()
    _activate()
    answer = []
    for cls in (classes.root, classes.mla, classes.early, classes.child):
        on = cls(**SIZES, enable_routing_replay=True, moe_router_fusion=True)
        off = cls(**SIZES)
        answer.append([on.enable_routing_replay, on.moe_router_fusion, off.enable_routing_replay])
    own = classes.own(**SIZES), classes.own(**SIZES, enable_routing_replay=False)
    answer.append([config.enable_routing_replay for config in own])
    return answer


def given_back() -> list[list[str]]:
    """[the classes that are as before after `deactivate()`, the problems]."""
    import replay_patch

    classes = _classes()

    def state() -> dict[Any, Any]:
        return {
            cls: (dict(vars(cls)), dict(cls.__dataclass_fields__))
            for cls in (classes.root, classes.mla, classes.early, classes.own)
        }

    before = state()
    replay_patch.activate()
    assert state() != before
    replay_patch.deactivate()
    after = state()
    same = [cls.__name__ for cls in before if after[cls] == before[cls]]
    return [same, list(replay_patch.status().problems)]


def _classes() -> Any:
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    @dataclasses.dataclass
    class Early(MLATransformerConfig):
        extra: int = 3

    @dataclasses.dataclass
    class Child(Early):
        pass

    @dataclasses.dataclass
    class Own(TransformerConfig):
        enable_routing_replay: bool = True

    return SimpleNamespace(
        root=TransformerConfig, mla=MLATransformerConfig, early=Early, child=Child, own=Own
    )


def decided_by_the_class() -> list[bool]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclasses.dataclass
    class Deciding(TransformerConfig):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.seen = getattr(self, "enable_routing_replay", None)
            self.enable_routing_replay = False

    class Naming(TransformerConfig):
        def __init__(self, layers: int, enable_routing_replay: bool = False) -> None:
            super().__init__(num_layers=layers, hidden_size=8, num_attention_heads=2)
            self.mirror = enable_routing_replay

    class Closed(TransformerConfig):
        def __init__(self, layers: int) -> None:
            super().__init__(num_layers=layers, hidden_size=8, num_attention_heads=2)

    _activate()
    deciding: Any = Deciding(**SIZES, enable_routing_replay=True)
    naming: Any = Naming(2, enable_routing_replay=True)
    closed: Any = Closed(2, enable_routing_replay=True)
    return [
        deciding.seen,
        deciding.enable_routing_replay,
        naming.mirror,
        closed.enable_routing_replay,
        Closed(2).enable_routing_replay,
    ]


def with_slots() -> bool:
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclasses.dataclass(slots=True)
    class Slots(TransformerConfig):
        extra: int = 3

    _activate()
    return Slots(**SIZES, enable_routing_replay=True).enable_routing_replay


def _activate() -> None:
    import replay_patch

    replay_patch.activate()
