"""verl on two ranks: tensor parallel with sequence parallelism, and two pipeline stages."""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers import trainers, verl_engine

R3 = {
    "captured rows": True,
    "the others have K experts": True,
    "the others are native": True,
    "all calls agree": True,
}


def ask(**parallel: int) -> list[Any]:
    """The answers of both ranks, of verl 0.9.1 on Megatron-core 0.16.1."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def rank(number: int) -> Any:
        variables = {"RANK": str(number), "WORLD_SIZE": "2"}
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        code = f"import os\nos.environ.update({variables!r})\n"
        code += f"from helpers import verl_questions as q; q.answer_of_rank(**{parallel!r})"
        return trainers.run(code, "0.16.1", {"verl": "0.9.1", "mbridge": verl_engine.MBRIDGE})

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


@pytest.mark.parametrize(
    "size, layers",
    [
        ("tensor_model_parallel_size", [[0, 1], [0, 1]]),
        ("pipeline_model_parallel_size", [[0], [1]]),
    ],
)
def test_each_rank_replays_its_own_rows_and_layers(size: str, layers: list[list[int]]) -> None:
    answers = ask(**{size: 2})

    for answer, own in zip(answers, layers, strict=True):
        assert answer == {
            "log probs": R3,
            "update": R3,
            "layers": own,
            "the update uses what was recorded": True,
            "without replay it would differ": True,
        }
