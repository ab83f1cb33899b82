"""A name that Megatron-Bridge's annotations want."""


class Sequential:
    def __init__(self, *args: object) -> None:
        raise NotImplementedError("the Transformer Engine stand-in has no operations")
