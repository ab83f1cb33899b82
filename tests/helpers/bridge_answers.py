"""What a model of two layers answers to `low_level` and `sessions` of `bridges` if it replays."""

BOTH = [True, True]
REPLAYED = {
    "listed": BOTH,
    "by position": BOTH,
    "changed": BOTH,
    "in sessions": BOTH,
    "report": [20, 0],  # 10 real tokens, 2 layers
    "wrapped in": ["GPTModel"],
}
WRAPPED = {"wrapped in": ["DistributedDataParallel", "Float16Module", "GPTModel"]}
