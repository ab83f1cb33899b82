"""What is asked of SkyRL's schedules: `schedules()` in one process, `ranks()` in two.

Each case returns what is wrong, in words; [] where all is right. It is the same code with and
without the plugin.
"""

import gc
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from helpers import skyrl_trainer
from helpers.skyrl_trainer import E

import replay_patch
from replay_patch.matrix import tiny

RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
LENGTHS = ([5, 4], [3, 6])
SAMPLES = ([0, 1], [2, 3])
HOLES = ((0, 4), (1, 2), (1, 3), (2, 0))
"""A synthetic EOS, a suffix, and a token in front."""


def _print(cases: Sequence[Callable[[], Any]], both: bool) -> None:
    found = [answers(cases)]
    if both:
        replay_patch.activate()
        found.append(answers(cases))
    print(json.dumps(found))


def answers(cases: Sequence[Callable[[], Any]]) -> dict[str, Any]:
    """What each case says, by name."""
    return {case.__name__: _answer(case) for case in cases}


def _answer(case: Callable[[], Any]) -> Any:
    gc.collect()
    _listed().clear()  # without the plugin routers of dead models stay, and shift all others
    try:
        return case()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def _listed() -> list[Any]:
    try:
        from megatron.core.transformer.moe.router_replay import RouterReplay
    except ImportError:
        return []
    return RouterReplay.global_router_replay_instances


def model(**over: Any) -> tuple[Any, skyrl_trainer.Calls]:
    """A model and the calls of its routers."""
    made = tiny.gpt_model(skyrl_trainer.config(**over), torch_attention=True)
    return made, skyrl_trainer.Calls(made)


def batches(layers: int, holes: Any = (), **options: Any) -> list[Any]:
    """Two microbatches of two samples."""
    return [
        skyrl_trainer.micro_batch(lengths, 8, layers, samples=samples, holes=holes, **options)
        for lengths, samples in zip(LENGTHS, SAMPLES, strict=True)
    ]


def compare(
    calls: skyrl_trainer.Calls,
    layers: Sequence[int],
    rows: Any,
    holes: Any = (),
    recompute: bool = False,
) -> list[str]:
    """What is wrong in the calls of these layers, for each microbatch of `batches`."""
    out = []
    for layer in layers:
        for backward in (False, True) if recompute else (False,):
            found = calls.maps(layer, backward=backward)
            if len(found) != len(LENGTHS):
                out.append(f"layer {layer}: {len(found)} calls")
            for call, samples, lengths in zip(found, SAMPLES, LENGTHS, strict=False):
                wrong = skyrl_trainer.wrong(call, rows(samples, lengths), layer, holes)
                out += [f"layer {layer}, backward {backward}, {what}" for what in wrong]
    return out


# --- one process ----------------------------------------------------------------------------------


def unpacked() -> list[str]:
    """Two sequences side by side, with recompute."""
    made, calls = model(**RECOMPUTE)
    skyrl_trainer.run(skyrl_trainer.wrapper([made]), batches(2))
    return compare(calls, (1, 2), skyrl_trainer.unpacked_rows, recompute=True)


def packed() -> list[str]:
    """Two sequences one after the other."""
    made, calls = model(**RECOMPUTE)
    skyrl_trainer.run(skyrl_trainer.wrapper([made], packed=True), batches(2))
    return compare(calls, (1, 2), skyrl_trainer.packed_rows, recompute=True)


def uncaptured() -> list[str]:
    """Packed, with tokens that have no route, in forward and recompute."""
    made, calls = model(**RECOMPUTE)
    skyrl_trainer.run(skyrl_trainer.wrapper([made], packed=True), batches(2, HOLES))
    return compare(calls, (1, 2), skyrl_trainer.packed_rows, HOLES, recompute=True)


def forward_only() -> list[str]:
    """The pass for log-probabilities."""
    made, calls = model()
    skyrl_trainer.run(skyrl_trainer.wrapper([made], packed=True), batches(2, HOLES), train=False)
    return compare(calls, (1, 2), skyrl_trainer.packed_rows, HOLES)


def padding() -> list[str]:
    """Half of all rows are padding, which the expert bias must not count (case 53), and one token
    has no route: it is counted, at the experts that it goes to."""
    made, calls = model(
        moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", num_layers=1
    )
    holes = ((0, 7),)
    batch = skyrl_trainer.micro_batch([8, 2, 3, 3], 8, 1, samples=[0, 1, 2, 3], holes=holes)
    wrapped = skyrl_trainer.wrapper([made])
    made.config.finalize_model_grads_func = None  # it takes the counts away
    skyrl_trainer.run(wrapped, [batch])
    rows = skyrl_trainer.unpacked_rows([0, 1, 2, 3], [8, 2, 3, 3])
    [call] = calls.maps(1)
    out = skyrl_trainer.wrong(call, rows, 1, holes)
    wanted = [0] * E
    for row, own in zip(rows, call[1].tolist(), strict=True):
        native = [expert for expert in range(E) if own[expert]]
        for expert in native if row in holes else skyrl_trainer.experts(*row, 1) if row else ():
            wanted[expert] += 1
    found = made.decoder.layers[0].mlp.router.local_tokens_per_expert.int().tolist()
    return out + ([] if found == wanted else [f"counts {found}, not {wanted}"])


def dense_and_mtp() -> list[str]:
    """One dense layer and one MTP block: as many routers as layers (SkyRL's shortcut)."""
    made, calls = model(num_layers=3, moe_layer_freq=[0, 1, 1], mtp_num_layers=1)
    skyrl_trainer.run(skyrl_trainer.wrapper([made], packed=True), batches(3), train=False)
    return compare(calls, (2, 3), skyrl_trainer.packed_rows) + _native_mtp(calls)


def dense_and_mtp_in_training() -> list[str]:
    """One dense layer and one MTP block, with SkyRL's own pass of the block, and recompute."""
    made, calls = model(num_layers=3, moe_layer_freq=[0, 1, 1], mtp_num_layers=1, **RECOMPUTE)
    skyrl_trainer.module("backends.skyrl_train.mtp.native_loss_patch").disable_native_mtp_loss()
    skyrl_trainer.run(skyrl_trainer.wrapper([made]), batches(3))
    wrong = compare(calls, (2, 3), skyrl_trainer.unpacked_rows, recompute=True)
    return wrong + _native_mtp(calls)


def _native_mtp(calls: skyrl_trainer.Calls) -> list[str]:
    mtp = [(found, native) for _, depth, _, found, native in calls if depth]
    if not mtp:
        return ["the MTP block has not run"]
    return ["an MTP block is replayed"] * any(not found.equal(native) for found, native in mtp)


def some_without_routes() -> list[str]:
    """Three microbatches, the one in the middle without routes; recompute."""
    made, calls = model(num_layers=1, **RECOMPUTE)
    given = [
        skyrl_trainer.micro_batch([4, 4], 4, 1, samples=[n, n + 3], routes=n != 1) for n in range(3)
    ]
    skyrl_trainer.run(skyrl_trainer.wrapper([made], packed=True), given)
    out = []
    for backward in (False, True):
        found = calls.maps(1, backward=backward)
        if len(found) != len(given):
            return [f"{len(found)} calls"]
        for n, call in enumerate(found):
            rows = skyrl_trainer.packed_rows([n, n + 3], [4, 4])
            out += skyrl_trainer.wrong(call, rows, 1, rows if n == 1 else ())
    return out


def left_over() -> list[str]:
    """What is there after a schedule without recompute, and after one that failed."""
    made, calls = model()
    wrapped = skyrl_trainer.wrapper([made], packed=True)
    skyrl_trainer.run(wrapped, batches(2))
    out = _state("after a schedule")
    broken = batches(2)
    broken[1]["loss_mask"] = None  # fails in the loss of the second one
    broken[1]["old_action_log_probs"] = broken[1]["num_actions"] = "none"
    try:
        skyrl_trainer.run(wrapped, broken)
    except TypeError:
        out += _state("after a failed one")
    else:
        out.append("no failure")
    calls.clear()
    skyrl_trainer.run(wrapped, batches(2))
    return out + compare(calls, (1, 2), skyrl_trainer.packed_rows)


def _state(when: str) -> list[str]:
    out = []
    for entry in _listed():
        if entry.replay_backward_list or entry.router_replay_action is not None:
            queued, action = len(entry.replay_backward_list), entry.router_replay_action
            out.append(f"{when}: {queued} queued, {action}")
    return out


def same_batch_again() -> list[str]:
    """A schedule leaves the batches as they were."""
    made, calls = model()
    wrapped, given = skyrl_trainer.wrapper([made], packed=True), batches(2)
    skyrl_trainer.run(wrapped, given, train=False)
    calls.clear()
    skyrl_trainer.run(wrapped, given, train=False)
    return compare(calls, (1, 2), skyrl_trainer.packed_rows)


def no_routes_at_all() -> list[str]:
    """Replay is on in the config: native, and a warning."""
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("replay_patch").addHandler(handler)
    made, calls = model()
    skyrl_trainer.run(skyrl_trainer.wrapper([made], packed=True), batches(2, routes=False))
    places = [
        place
        for each in zip(SAMPLES, LENGTHS, strict=True)
        for place in skyrl_trainer.packed_rows(*each)
    ]
    out = compare(calls, (1, 2), skyrl_trainer.packed_rows, places)
    return out if any("no microbatch has" in each for each in said) else [*out, "not a word"]


def called_directly() -> list[str]:
    """SkyRL's functions by themselves, for one unpacked microbatch: forward and recompute."""
    utils = skyrl_trainer.replay_utils()
    utils.patch_topk_router_layer_number()
    options = {"num_layers": 3, "moe_layer_freq": [0, 1, 1], "mtp_num_layers": 1}
    made, calls = model(**options, mtp_loss_scaling_factor=0.1, **RECOMPUTE)
    [batch, _] = batches(3, HOLES)
    ids, mask = batch["rollout_expert_indices"], batch["attention_mask"]
    utils.setup_per_microbatch_replay_forward(ids, mask, model_config=made.config)
    skyrl_trainer.call_unpacked(
        made, batch, before_backward=utils.setup_per_microbatch_replay_backward
    )
    utils.clear_router_replay()
    out = []
    for layer in (2, 3):
        for backward in (False, True):
            [call] = calls.maps(layer, backward=backward)
            rows = skyrl_trainer.unpacked_rows(SAMPLES[0], LENGTHS[0])
            out += skyrl_trainer.wrong(call, rows, layer, HOLES)
    return out + _native_mtp(calls) + _state("after clear_router_replay()")


def called_directly_without_recompute() -> list[str]:
    """Nothing is kept for a recompute that does not come."""
    utils = skyrl_trainer.replay_utils()
    made, calls = model()
    for batch, samples, lengths in zip(batches(2), SAMPLES, LENGTHS, strict=True):
        ids, mask = batch["rollout_expert_indices"], batch["attention_mask"]
        utils.setup_per_microbatch_replay_forward(ids, mask, model_config=made.config)
        calls.clear()
        skyrl_trainer.call_unpacked(
            made, batch, before_backward=utils.setup_per_microbatch_replay_backward
        )
        [call] = calls.maps(1)
        wrong = skyrl_trainer.wrong(call, skyrl_trainer.unpacked_rows(samples, lengths), 1)
    queued = [len(entry.replay_backward_list) for entry in _listed()]
    utils.clear_router_replay()
    return wrong + ([f"{queued} queued"] if any(queued) else [])


def called_directly_for_two_models() -> list[str]:
    """The call does not say for which."""
    first, second = model()[0], model()[0]
    [batch, _] = batches(2)
    skyrl_trainer.replay_utils().setup_per_microbatch_replay_forward(
        batch["rollout_expert_indices"], batch["attention_mask"], first.config
    )
    return [f"taken, with {len(_listed())} routers of {first.__class__ is second.__class__}"]


def bad_routes() -> list[str]:
    """An expert out of range, a row that repeats one, another number of layers."""
    made, _ = model()
    wrapped = skyrl_trainer.wrapper([made], packed=True)
    out = []
    for spoil in (_out_of_range, _repeating, _one_layer_less):
        given = batches(2)
        spoil(given[1])
        try:
            skyrl_trainer.run(wrapped, given)
        except Exception as error:
            out.append(f"{type(error).__name__}: {error}"[:150])
        else:
            out.append(f"{spoil.__name__}: taken")
    return out


def _out_of_range(batch: Any) -> None:
    batch["rollout_expert_indices"][1, -2, 1, 0] = E


def _repeating(batch: Any) -> None:
    batch["rollout_expert_indices"][1, -2, 1] = 3


def _one_layer_less(batch: Any) -> None:
    batch["rollout_expert_indices"] = batch["rollout_expert_indices"][:, :, :1]


def schedules(both: bool = False) -> None:
    """Print all of one process.

    Args:
        both: without our patches, and then with them.
    """
    skyrl_trainer.prepare()
    tiny.init()
    cases = [
        unpacked,
        packed,
        uncaptured,
        forward_only,
        padding,
        dense_and_mtp,
        dense_and_mtp_in_training,
        some_without_routes,
        left_over,
        same_batch_again,
        no_routes_at_all,
        called_directly,
        called_directly_without_recompute,
        called_directly_for_two_models,
        bad_routes,
    ]
    _print(cases, both)


# --- two processes --------------------------------------------------------------------------------


def sequence_parallel_off() -> list[str]:
    """Two tensor-parallel ranks that both have all rows."""
    return _on_two_ranks(_tensor_parallel, False, False, ())


def sequence_parallel_on() -> list[str]:
    """Each rank has one half of the rows, cut once; sequences are padded for it."""
    return _on_two_ranks(_tensor_parallel, True, False, HOLES)


def sequence_parallel_unpacked() -> list[str]:
    """Each rank has one half of the rows of two sequences side by side."""
    return _on_two_ranks(_tensor_parallel, True, True, HOLES)


def _tensor_parallel(
    rank: int, world: int, init_file: str, cut: bool, side: bool, holes: Any
) -> list[str]:
    tiny.init(world, rank, init_file, tensor_model_parallel_size=world)
    made, calls = model(tensor_model_parallel_size=world, sequence_parallel=cut)
    wrapped = skyrl_trainer.wrapper([made], packed=not side)
    wrapped.eval()  # Megatron refuses to train experts without sequence parallelism
    skyrl_trainer.run(wrapped, batches(2, holes), train=False)

    def rows(samples: Sequence[int], lengths: Sequence[int]) -> Any:
        whole = (skyrl_trainer.unpacked_rows if side else skyrl_trainer.packed_rows)(
            samples, lengths, world
        )
        half = len(whole) // world
        return whole[rank * half : (rank + 1) * half] if cut else whole

    return compare(calls, (1, 2), rows, holes)


def several_in_a_row() -> list[str]:
    """Controller-side packing: each row of the batch is two sequences, both padded."""
    return _on_two_ranks(_several_in_a_row)


def _several_in_a_row(rank: int, world: int, init_file: str) -> list[str]:
    import torch

    tiny.init(world, rank, init_file, tensor_model_parallel_size=world)
    made, calls = model(tensor_model_parallel_size=world, sequence_parallel=True)
    lengths = [3, 5]
    batch = skyrl_trainer.micro_batch(lengths, 8, 2, samples=[0, 1])
    keep = batch["attention_mask"].bool()  # of both one position more: the padding
    keep = keep | keep.roll(-1, 1)
    one = {
        name: batch[name].roll(-1, 1)[keep].view(1, 10, *batch[name].shape[2:])
        for name in ("sequences", "attention_mask", "position_ids", "rollout_expert_indices")
    }
    more = {"sub_seq_lengths": [torch.tensor(lengths)], "num_actions": 7}
    wrapped = skyrl_trainer.wrapper([made], packed=True)
    wrapped.eval()
    skyrl_trainer.run(wrapped, [one | more], train=False)
    [call] = calls.maps(1)
    return skyrl_trainer.wrong(
        call, skyrl_trainer.packed_rows([0, 1], lengths, 2)[5 * rank :][:5], 1
    )


def context_parallel() -> list[str]:
    """Each rank has two quarters of every sequence, from both ends."""
    return _on_two_ranks(_context_parallel)


def _context_parallel(rank: int, world: int, init_file: str) -> list[str]:
    tiny.init(world, rank, init_file, context_parallel_size=world)
    made, calls = model(context_parallel_size=world)
    skyrl_trainer.run(skyrl_trainer.wrapper([made], packed=True), batches(2, HOLES), train=False)

    def rows(samples: Sequence[int], lengths: Sequence[int]) -> Any:
        out = []
        for sample, length in zip(samples, lengths, strict=True):
            whole = skyrl_trainer.packed_rows([sample], [length], 2 * world)
            part = len(whole) // (2 * world)
            for chunk in (rank, 2 * world - 1 - rank):
                out += whole[chunk * part : (chunk + 1) * part]
        return out

    return compare(calls, (1, 2), rows, HOLES)


def dense_stage() -> list[str]:
    """The first of two pipeline ranks has no experts."""
    return _on_two_ranks(_dense_stage)


def _dense_stage(rank: int, world: int, init_file: str) -> list[str]:
    tiny.init(world, rank, init_file, pipeline_model_parallel_size=world)
    options = {"num_layers": 4, "moe_layer_freq": [0, 0, 1, 1], "variable_seq_lengths": True}
    made = skyrl_trainer.config(pipeline_model_parallel_size=world, **options, **RECOMPUTE)
    chunks = tiny.model_chunks(made, torch_attention=True)
    calls = skyrl_trainer.Calls(*chunks)
    skyrl_trainer.run(skyrl_trainer.wrapper(chunks, packed=True), batches(4, HOLES))
    layers = (3, 4) if rank else ()
    return compare(calls, layers, skyrl_trainer.packed_rows, HOLES, recompute=True)


def virtual_stages() -> list[str]:
    """Two pipeline ranks with two chunks each, four layers, with recompute."""
    return _on_two_ranks(_virtual_stages)


def _virtual_stages(rank: int, world: int, init_file: str) -> list[str]:
    sizes = {"pipeline_model_parallel_size": world, "virtual_pipeline_model_parallel_size": 2}
    tiny.init(world, rank, init_file, **sizes)
    options = {"num_layers": 4, "variable_seq_lengths": True, **RECOMPUTE, **tiny.VPP_P2P}
    chunks = tiny.model_chunks(skyrl_trainer.config(**sizes, **options), torch_attention=True)
    calls = skyrl_trainer.Calls(*chunks)
    skyrl_trainer.run(skyrl_trainer.wrapper(chunks, packed=True), batches(4, HOLES))
    return compare(calls, (1 + rank, 3 + rank), skyrl_trainer.packed_rows, HOLES, recompute=True)


def virtual_stage_called_directly() -> list[str]:
    """SkyRL's function does not say for which chunk."""
    return _on_two_ranks(_virtual_stage_called_directly)


def _virtual_stage_called_directly(rank: int, world: int, init_file: str) -> list[str]:
    sizes = {"pipeline_model_parallel_size": world, "virtual_pipeline_model_parallel_size": 2}
    tiny.init(world, rank, init_file, **sizes)
    made = skyrl_trainer.config(**sizes, **tiny.VPP_P2P, num_layers=4)
    chunks = tiny.model_chunks(made)
    [batch, _] = batches(4)
    try:
        skyrl_trainer.replay_utils().setup_per_microbatch_replay_forward(
            batch["rollout_expert_indices"], batch["attention_mask"], made
        )
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return [f"taken for {len(chunks)} chunks"]


def _on_two_ranks(function: Any, *args: Any) -> list[str]:
    try:
        said = tiny.launch(function, 2, args, timeout=60)
    except RuntimeError as error:  # with the traceback of each rank
        return sorted({line for line in str(error).splitlines() if re.match(r"\w+Error: ", line)})
    return [f"rank {rank}: {what}" for rank, each in enumerate(said) for what in each]


def ranks(both: bool = False) -> None:
    """Print all of two processes; `both` as in `schedules`."""
    skyrl_trainer.prepare()
    skyrl_trainer.module(
        "backends.skyrl_train.workers.megatron.megatron_model_wrapper"
    )  # forked with it
    cases = [
        sequence_parallel_off,
        sequence_parallel_on,
        sequence_parallel_unpacked,
        several_in_a_row,
        context_parallel,
        dense_stage,
        virtual_stages,
        virtual_stage_called_directly,
    ]
    _print(cases, both)
