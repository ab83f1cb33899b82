"""The demo itself, in a process of its own: `python -m replay_patch.demo.experiment --seed 0`.

The bf16 copy of a tiny, random mixture-of-experts GPT of a real Megatron-core plays the rollout
engine: it writes responses, and its routers' choices are recorded. The fp32 original is the
trainer: it takes the same policy-gradient steps on those responses twice, choosing experts anew and
replaying the recorded choices. All that is reported is read off the routers' own outputs and the
models' own log-probabilities.

It prints JSON lines: `{"progress": "..."}` while it runs, and `{"result": {...}}`.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import replay_patch
from replay_patch.demo.model import (
    SIZES,
    Sizes,
    as_map,
    build,
    positions,
    replay_objects,
    stacked,
    watch_routing_maps,
)
from replay_patch.demo.rollout import Rollout, roll_out
from replay_patch.errors import ReplayPatchError
from replay_patch.matrix import cpu, tiny
from replay_patch.processes import parents_stdout


def main(argv: list[str] | None = None) -> None:
    """Run the demo and print its result."""
    parser = argparse.ArgumentParser(prog="python -m replay_patch.demo.experiment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megatron", type=Path, help="the folder megatron must come from")
    args = parser.parse_args(argv)
    stdout = parents_stdout()

    def say(**message: Any) -> None:
        print(json.dumps(message), file=stdout)

    try:
        if args.megatron is not None:
            _check_origin(args.megatron)
        say(result=run(args.seed, progress=lambda line: say(progress=line)))
    except ReplayPatchError as error:
        parser.exit(1, f"{error}\n")


def run(
    seed: int, sizes: Sizes = SIZES, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Roll out once, train without and with replay from the same weights, and compare: plain JSON
    types, see `replay_patch.demo.launch.run_demo`. `seed` is of weights, prompts and sampling;
    `progress` is called with a line before each part. A ReplayPatchError if a captured decision was
    not replayed exactly."""
    progress = progress or (lambda line: None)
    replay_patch.activate()
    cpu.install()
    tiny.init(seed=seed)
    import torch
    from megatron.core.package_info import __version__ as release

    trainer = build(sizes, seed, torch.float32)
    engine = build(sizes, seed, torch.bfloat16)
    start = {name: weight.detach().clone() for name, weight in trainer.named_parameters()}
    _copy(start, engine)  # rounds to bf16

    generator = torch.Generator().manual_seed(seed)
    progress(f"Megatron-core {release}: {sizes.sequences} responses from the bf16 rollout engine")
    rollout = roll_out(engine, sizes, generator)
    advantages = torch.randn(sizes.sequences, generator=generator)
    advantages = (advantages - advantages.mean()) / advantages.std()

    measured, losses = {}, {}
    for name, replay in (("without_replay", False), ("with_replay", True)):
        progress(f"{sizes.steps} training steps in fp32 {name.replace('_', ' ')}")
        _copy(start, trainer)
        measured[name], losses[name] = train(trainer, rollout, advantages, sizes, replay)
    tiny.shutdown()
    return {
        "megatron": release,
        "seed": seed,
        "tokens": rollout.tokens.numel(),
        "layers": sizes.layers,
        "captured": float(rollout.captured.double().mean()),
        **measured,
        "loss": losses,
        "sizes": asdict(sizes),
        "torch": torch.__version__,
    }


def train(
    model: Any, rollout: Rollout, advantages: Any, sizes: Sizes, replay: bool
) -> tuple[dict[str, float], list[float]]:
    """A few policy-gradient steps through Megatron's own schedule. Returns the four measures of the
    first step, where trainer and rollout have the same weights, and the loss of every step."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    maps = watch_routing_maps(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=sizes.learning_rate)
    sampled = rollout.tokens[:, sizes.prompt :, None]
    old = rollout.log_probs.gather(-1, sampled)[..., 0]
    seen: list[tuple[Any, Any]] = []  # routing maps and log-probs, by microbatch

    def forward_step(parts: Iterator[Any], model: Any) -> tuple[Any, Any]:
        part = next(parts)
        tokens = rollout.tokens[part]
        _clear(model)
        for layer, entry in enumerate(replay_objects(model) if replay else []):
            target = rollout.routes[:, part, layer].reshape(-1, sizes.topk)
            entry.set_target_indices(target)
            entry.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        logits = model(tokens, positions(tokens), None)
        routing = stacked(maps).view(sizes.length, len(tokens), sizes.layers, sizes.experts)

        def loss_of(logits: Any) -> tuple[Any, dict[str, Any]]:
            new = logits[:, sizes.prompt - 1 : -1].float().log_softmax(-1)
            seen.append((routing, new.detach()))
            ratio = (new.gather(-1, sampled[part])[..., 0] - old[part]).exp()
            loss = -(ratio * advantages[part, None]).mean()
            return loss, {"loss": loss.detach()}

        return logits, loss_of

    width = sizes.sequences // sizes.microbatches
    parts = [slice(i * width, (i + 1) * width) for i in range(sizes.microbatches)]
    losses: list[float] = []
    first: dict[str, float] = {}
    for step in range(sizes.steps):
        seen.clear()
        optimizer.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(parts),
            model=model,
            num_microbatches=sizes.microbatches,
            seq_length=sizes.length,
            micro_batch_size=width,
            forward_only=False,
        )
        optimizer.step()
        losses.append(sum(float(output["loss"]) for output in outputs) / len(outputs))
        routings, log_probs = zip(*seen, strict=True)
        routing = torch.cat(routings, dim=1)
        if (routing.sum(-1) != sizes.topk).any():
            raise ReplayPatchError(f"demo: a token did not get {sizes.topk} different experts")
        measured = compare(rollout, routing, torch.cat(log_probs), sizes)
        if replay and measured["router_decisions_differ"] != 0:
            raise ReplayPatchError(
                f"demo: replay did not hold: in training step {step + 1}, "
                f"{measured['router_decisions_differ']:.2%} of the captured router decisions "
                "differ from the rollout's; expected none"
            )
        first = first or measured
    _clear(model)
    return first, losses


def compare(rollout: Rollout, routing: Any, log_probs: Any, sizes: Sizes) -> dict[str, float]:
    """The four measures of the demo. `routing` are the trainer's routing maps, bool
    [S, B, layers, experts], `log_probs` its float32 [B, S - prompt, vocabulary]."""
    differs = (routing != as_map(rollout.routes, sizes.experts)).any(-1)[rollout.captured]
    theirs, ours = rollout.log_probs.double(), log_probs.double()
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)  # KL(rollout || trainer), exactly
    sampled = rollout.tokens[:, sizes.prompt :, None]
    ratio = (theirs.gather(-1, sampled) - ours.gather(-1, sampled)).abs().exp()
    return {
        "router_decisions_differ": float(differs.double().mean()),
        "tokens_differ": float(differs.any(-1).double().mean()),
        "kl": float(divergence.mean()),
        "extreme_tokens": float((ratio > 2).double().mean()),
    }


def _clear(model: Any) -> None:
    for entry in replay_objects(model):
        entry.clear_indices()
        entry.clear_router_replay_action()


def _copy(weights: dict[str, Any], model: Any) -> None:
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights[name])


def _check_origin(folder: Path) -> None:
    """A `megatron/__init__.py` anywhere on sys.path wins over a release, which has none."""
    spec = importlib.util.find_spec("megatron")
    packages = list(spec.submodule_search_locations or []) if spec is not None else []
    origin = Path(packages[0]).absolute().parent if packages else None
    if origin != folder.absolute():
        raise ReplayPatchError(
            f"demo: megatron is taken from {origin}, expected from {folder}; remove the other one "
            "from PYTHONPATH, or uninstall it"
        )


if __name__ == "__main__":
    main()
