"""What is asked of SkyRL's way from the rollout to a microbatch, in one process: `data()`.

Sample i has the tokens 100 i, 100 i + 1, ...: so each token says whose routes it should have.
Answers as in `skyrl_cases`.
"""

import json
import logging
import os
import pickle
from types import SimpleNamespace
from typing import Any

from helpers import skyrl_trainer
from helpers.skyrl_cases import answers

PROMPT = 2
RESPONSES = [3, 2, 4, 1, 2]
LAYERS = 2
FIELD = "rollout_expert_indices"


def routes(sample: int) -> list[list[list[int]]]:
    """Of all tokens but the last, which no engine has a route of."""
    rows = range(PROMPT + RESPONSES[sample % len(RESPONSES)] - 1)
    return [
        [skyrl_trainer.experts(sample, row, layer + 1) for layer in range(LAYERS)] for row in rows
    ]


def rollout(samples: Any, rewards: Any = None) -> dict[str, Any]:
    """As a generator returns it."""
    tokens = {
        s: [100 * s + row for row in range(PROMPT + RESPONSES[s % len(RESPONSES)])] for s in samples
    }
    return {
        "prompt_token_ids": [tokens[s][:PROMPT] for s in samples],
        "response_ids": [tokens[s][PROMPT:] for s in samples],
        "rewards": list(rewards or [float(s) for s in samples]),
        "loss_masks": [[1] * len(tokens[s][PROMPT:]) for s in samples],
        "stop_reasons": [f"reason {s}" for s in samples],
        "rollout_metrics": {},
        "rollout_logprobs": None,
        FIELD: [routes(s) for s in samples],
    }


def tensors(given: dict[str, Any]) -> Any:
    """SkyRL's batch of it."""
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks")
    rewards = [
        [float(r)] * len(m) for r, m in zip(given["rewards"], given["loss_masks"], strict=True)
    ]
    convert = skyrl_trainer.module(
        "train.dataset.preprocess"
    ).convert_prompts_responses_to_batch_tensors
    made = convert(
        SimpleNamespace(pad_token_id=0),
        *(rewards if name == "rewards" else given[name] for name in names),
        None,
        given[FIELD],
    )
    batches = skyrl_trainer.module("backends.skyrl_train.training_batch")
    batch = batches.TrainingInputBatch(
        {"sequences": made[0], "attention_mask": made[1], "loss_mask": made[4], FIELD: made[6]}
    )
    batch.metadata = {"response_length": made[2].shape[1], "uids": list(range(len(made[0])))}
    return batch


def mismatched(batch: Any) -> list[str]:
    """Tokens of a batch whose routes are not their own."""
    if batch.get(FIELD) is None:
        return ["no routes"]
    out = []
    for row, sequence in enumerate(batch["sequences"].tolist()):
        for place, token in enumerate(sequence):
            if not batch["attention_mask"][row, place]:
                continue
            sample, position = divmod(token, 100)
            own = routes(sample)
            wanted = own[position] if position < len(own) else [[0] * skyrl_trainer.K] * LAYERS
            if batch[FIELD][row, place].tolist() != wanted:
                out.append(f"row {row}: token {token}")
    return out


def strayed(given: dict[str, Any]) -> list[str]:
    """Samples of a generator's output whose fields are not all of one sample."""
    held = given.get(FIELD)
    if held is None:
        return ["no routes"]
    out = []
    for place, prompt in enumerate(given["prompt_token_ids"]):
        sample = prompt[0] // 100
        if held[place] != routes(sample):
            out.append(f"place {place}: sample {sample} has others' routes")
        if given["stop_reasons"][place] != f"reason {sample}":
            out.append(f"place {place}: sample {sample} has {given['stop_reasons'][place]}")
    return out


# --- cases ----------------------------------------------------------------------------------------


def reordered_and_split() -> list[str]:
    """Five samples, permutation [3, 1, 0, 4, 2], two microbatches (case 57)."""
    iterators = skyrl_trainer.module("backends.skyrl_train.workers.worker_utils")
    batch = tensors(rollout(range(5)))
    by_tokens = iterators.TokenBasedBatchIterator(batch, max_tokens_per_microbatch=10**6)
    moved = by_tokens._create_microbatch_from_indices([3, 1, 0, 4, 2])
    firsts = [row[row > 0][0].item() // 100 for row in moved["sequences"].float()]
    out = [] if firsts == [3, 1, 0, 4, 2.0] else [f"order {firsts}"]
    parts = moved.chunk(3)
    out += [] if [len(part) for part in parts] == [3, 2] else ["parts"]
    for part in parts:
        out += mismatched(part)
    for each in (
        pickle.loads(pickle.dumps(moved)),
        type(moved).cat(parts),
        moved[1:3],
        skyrl_trainer.module("backends.skyrl_train.training_batch").pad_training_input_batch(
            batch, 2
        ),
    ):
        out += mismatched(each)
    for part in iterators.TokenBasedBatchIterator(batch, max_tokens_per_microbatch=9):
        out += mismatched(part)
    for experience in iterators.BatchIterator(batch, 2):
        out += mismatched({**vars(experience), "attention_mask": experience.attention_mask})
    return out


def filtered() -> list[str]:
    """Dynamic sampling, two rounds: groups without variance are dropped."""
    utils = skyrl_trainer.module("train.utils.trainer_utils")
    options = {"train_batch_size": 3, "n_samples_per_prompt": 2}
    state: Any = {"sample_batch_count": 1}
    out = []
    for samples, rewards in (([0, 1, 2, 3], [0, 1, 1, 1]), ([4, 5, 6, 7], [0, 1, 1, 0])):
        uids = [f"prompt {s // 2}" for s in samples]
        given = rollout(samples, [float(r) for r in rewards])
        done, _, again, state = utils.handle_filter_sampling(given, uids, options, state)
    kept = [prompt[0] // 100 for prompt in done["prompt_token_ids"]]
    out += [] if kept == [0, 1, 4, 5, 6, 7] and not again else [f"kept {kept}, again {again}"]
    return out + strayed(done)


def replaced() -> list[str]:
    """Dynamic sampling: a group without variance is replaced by another."""
    utils = skyrl_trainer.module("train.utils.trainer_utils")
    given = rollout(range(8), [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    uids = [f"prompt {s // 2}" for s in range(8)]
    options = {"n_samples_per_prompt": 2, "min_replace_ratio": 0.3}
    done, now, again = utils.handle_replace_sampling(given, uids, options)
    places = [f"prompt {prompt[0] // 200}" for prompt in done["prompt_token_ids"]]
    out = [] if places == now and "prompt 1" not in now and not again else [f"{places}, {now}"]
    return out + strayed(done) + ([] if done is given else ["another object"])


def one_sample_without() -> list[str]:
    """Two samples, the field in one of them (case 73)."""
    given = rollout(range(2))
    given[FIELD][1] = None
    return _tried(lambda: tensors(given))


def no_sample_with() -> list[str]:
    """The engine was asked, and answered nothing."""
    given = rollout(range(2))
    given[FIELD] = [None, []]
    return _tried(lambda: tensors(given))


def masked_sample_without() -> list[str]:
    """One that has failed in the rollout."""
    given = rollout(range(2))
    given[FIELD][1], given["loss_masks"][1] = None, [0] * len(given["loss_masks"][1])
    return _tried(lambda: tensors(given))


def field_lost() -> list[str]:
    """SkyRL's trainer, its engine is asked for routes, and the batch has no such field."""
    trainer = skyrl_trainer.module("train.trainer").RayPPOTrainer
    config = skyrl_trainer.module("train.config").SkyRLTrainConfig()
    config.generator.inference_engine.enable_return_routed_experts = True
    config.trainer.train_batch_size = config.trainer.policy_mini_batch_size = 2
    config.generator.n_samples_per_prompt = 1
    config.trainer.critic.model.path = None
    tokenizer = SimpleNamespace(pad_token_id=0)
    ranks = SimpleNamespace(get_lcm_dp_size=lambda: 1)
    this = SimpleNamespace(cfg=config, tokenizer=tokenizer, all_metrics={}, dispatch=ranks)
    given = rollout(range(2))
    given["rewards"] = [[float(s)] * RESPONSES[s] for s in range(2)]
    del given[FIELD]
    return _tried(lambda: trainer.convert_to_training_input(this, given, ["a", "b"]))


def _tried(call: Any) -> list[str]:
    try:
        call()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return ["taken"]


def environment() -> list[str]:
    """Our variables among those of Ray's workers."""
    os.environ["REPLAY_PATCH_LOG"] = "INFO"
    utils = skyrl_trainer.module("train.utils.utils")
    utils.peer_access_supported = lambda **_: True  # it asks a Ray cluster
    made = utils.prepare_runtime_environment(
        skyrl_trainer.module("train.config").SkyRLTrainConfig()
    )
    return [name for name in ("REPLAY_PATCH", "REPLAY_PATCH_LOG") if name not in made]


def data() -> None:
    """All of them, without our patches and then with them."""
    import replay_patch

    logging.disable(logging.INFO)
    skyrl_trainer.prepare()
    os.environ["REPLAY_PATCH"] = "1"
    cases = [
        reordered_and_split,
        filtered,
        replaced,
        one_sample_without,
        no_sample_with,
        masked_sample_without,
        field_lost,
        environment,
    ]
    found = [answers(cases)]
    replay_patch.activate()
    print(json.dumps([*found, answers(cases)]))
