"""Check this package against real Megatron-core releases, on any machine.

Megatron without a GPU: `cpu` and `ascend_bed` make it importable, `tiny` and `attention` are its
models, `ranks` its processes. `replay-patch matrix`: `planning` and `environments` fetch what is
asked for, `runner` starts a process of `cells` for each, which forks `cell_processes` for the
`checks`, and `report` shows what they say. `fingerprints_on_bed` compares with tested releases.
The plugin itself imports nothing of it, and importing it changes nothing.
"""
