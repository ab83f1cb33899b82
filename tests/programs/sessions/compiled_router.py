"""For tests/release/sessions/test_session_routers.py."""

S, B, E, K = 4, 2, 6, 2


def replayed() -> tuple[list[bool], list[int]]:
    """(whether each session replayed, dynamo's frames after each) of one compiled router."""
    from replay_patch.matrix import cpu, tiny

    cpu.install(torch_compile=True)
    tiny.init()
    import torch
    from helpers.routers import OneRouter, as_map, make_config
    from torch._dynamo.utils import counters

    from replay_patch import Routes, TokenLayout, replaying

    chunk = OneRouter(tiny.router(make_config()))
    whole = chunk.router.forward
    chunk.router.forward = torch.compile(lambda hidden: whole(hidden), backend="eager")
    right, frames = [], []
    for _ in range(12):
        ids = torch.rand(B, S, 1, E).argsort(3)[..., :K]
        with replaying(chunk) as replay:
            layout = TokenLayout.padded([S] * B, S)
            replay.load(chunk, [Routes(one, E) for one in ids], layout)
            probs, routing_map = chunk(torch.randn(S, B, 16))
            probs.sum().backward()
        rows = ids[:, :, 0].transpose(0, 1).flatten(0, 1)
        right.append(torch.equal(routing_map, as_map(rows, E)))
        frames.append(counters["frames"]["total"])
    return right, frames
