"""A stand-in for Ascend's MindSpeed, written from facts about it and not from its code.

MindSpeed is not on PyPI, and rewrites Megatron while it is imported. This package does what matters
to a plugin beside it, in the same order, under the same module and argument names:

* the patch manager of 2.2 and later, and `repatch` (`patch_utils`, `megatron_adaptor`);
* configs whose class is made anew for each object (`core.megatron_basic.arguments_basic`);
* features that are off until `repatch` switches them on (the table in `megatron_adaptor`). What
  they put into Megatron is recognisable and takes the same arguments, and computes only what is
  said there.

Not imitated: the packages that MindSpeed fakes (Transformer Engine, apex), `torch_npu`, and all
that it patches besides.

Its branches differ. The variable MINDSPEED_STANDIN has words for it:

* "init_subclass": a later subclass of the config gets the arguments, too (26.x, core 0.15, 0.16);
* "no_mla": MLATransformerConfig is forgotten, and cannot be built (core 0.17).
"""
