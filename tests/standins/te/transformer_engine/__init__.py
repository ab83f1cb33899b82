"""A stand-in for Transformer Engine: its layer classes as plain torch modules, for one CPU.

Only what Megatron-core and the trainers need to be imported and to build a tiny model. It has none
of the router's functions, no FP8 and no tensor parallelism: what is missing is an ImportError or
AttributeError, as in a Transformer Engine too old to have it, and an argument that would have an
effect here is refused.
"""

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]

__version__ = "1.12.0"  # old: from 1.13 on Megatron also defines what stands on `pytorch.ops`
