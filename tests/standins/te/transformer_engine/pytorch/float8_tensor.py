"""Megatron asks whether a tensor is one."""


class Float8Tensor: ...
