"""What a `replaying()` block did: counted on the host, without waiting for a device."""

import torch
from torch import Tensor


class Report:
    """Tokens of this rank, each counted once per layer that it went through.

    Attributes:
        replayed: with a captured route.
        holes: real tokens without one; they took the native experts.
        padding: rows that are no token.
    """

    def __init__(self) -> None:
        self.replayed = 0
        self.holes = 0
        self.padding = 0
        self._hits: dict[int, Tensor] = {}  # layer -> sum on the device, until it is read
        self._decisions: dict[int, int] = {}
        self._overlap: dict[int, int] = {}

    @property
    def overlap(self) -> dict[int, float]:
        """Layer number -> share of the captured choices that native routing would have made, too.
        Only of the sampled microbatches. Reading it waits for the device: do so after the schedule.
        """
        if self._hits:
            layers = list(self._hits)
            sums = torch.stack([self._hits[layer] for layer in layers]).tolist()
            for layer, hits in zip(layers, sums, strict=True):
                self._overlap[layer] = self._overlap.get(layer, 0) + int(hits)
            self._hits = {}
        return {
            layer: self._overlap[layer] / decisions
            for layer, decisions in sorted(self._decisions.items())
        }

    def count(self, replayed: int, holes: int, padding: int) -> None:
        """Add the rows of one router call."""
        self.replayed += replayed
        self.holes += holes
        self.padding += padding

    def compare(self, layer: int, ids: Tensor, native: Tensor, captured: Tensor, rows: int) -> None:
        """Add the overlap of one router call: of the replayed `ids` with `native`, what the router
        would have taken, both int64 [R, K], in the `rows` rows that `captured`, bool [R, 1], marks.
        """
        same = (ids.unsqueeze(2) == native.unsqueeze(1)).any(2)
        hits = (same & captured).sum()
        before = self._hits.get(layer)
        self._hits[layer] = hits if before is None else before + hits
        self._decisions[layer] = self._decisions.get(layer, 0) + rows * ids.shape[1]

    def __repr__(self) -> str:
        return (
            f"<Report: {self.replayed} tokens replayed, {self.holes} holes, "
            f"{self.padding} rows of padding, summed over layers>"
        )
