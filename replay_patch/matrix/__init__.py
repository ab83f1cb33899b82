"""Check this package against real Megatron-core releases, on any machine.

`environments` fetches the releases, `cpu`, `tiny` and `attention` run them without a GPU.
Nothing here is imported by the plugin itself, and importing it changes nothing.
"""
