"""What each rank holds of a model in training: by formula, and as measured under DDP, ZeRO, FSDP and tensor parallelism."""

from collections.abc import Iterator
from dataclasses import dataclass

from labkit.experiments import programs
from labkit.experiments.result import Row, Run, checked_count

KINDS = ("parameters", "gradients", "optimizer state")
# Which kinds each way cuts into as many parts as there are ranks. ZeRO's stages are those of Rajbhandari et al., 2020; FSDP is the third.
CUT = {
    "DDP": (),
    "ZeRO-1": ("optimizer state",),
    "ZeRO-2": ("gradients", "optimizer state"),
    "FSDP": KINDS,
    "tensor parallel": KINDS,
}
MEASURED = ("DDP", "ZeRO-1", "FSDP", "tensor parallel")  # torch.distributed has no ZeRO-2 of its own
FLOAT = 4  # bytes
COLUMNS = {"way": "", "rank": "", "kind": "", "bytes": "bytes", "formula": "bytes", "whole": "bytes"}
LARGEST = 1024  # neurons


@dataclass(frozen=True)
class Held:
    """Bytes that one rank holds."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state


def held(way: str, parameters: int, ranks: int) -> Held:
    """Bytes on each rank for so many float32 parameters and Adam, which keeps two numbers for each. Without activations.

    Raises ValueError for an unknown way.
    """
    if way not in CUT:
        raise ValueError(f"way={way!r}: choose one of {', '.join(map(repr, CUT))}")
    numbers = {"parameters": 1, "gradients": 1, "optimizer state": 2}
    return Held(*(FLOAT * numbers[kind] * parameters // (ranks if kind in CUT[way] else 1) for kind in KINDS))


def held_by_ranks(ranks: int = 2, width: int = 256, layers: int = 4) -> Run:
    """Bytes that each of so many ranks holds after a training step with Adam, by way and kind, beside those of the formula.

    The model has `layers` linear layers of `width` × `width` weights. `whole` is how many bytes of parameters lie there in one piece
    while a layer computes. Counted are the tensors' own bytes; Adam's step numbers, four bytes a tensor, are among them.

    Raises ValueError for what is out of bounds; width and the number of layers must divide by the ranks and by two. Raises as
    `labkit.torchrun` does, besides.
    """
    for name, value, most in (("ranks", ranks, 8), ("width", width, LARGEST), ("layers", layers, 16)):
        if checked_count(name, value) > most:
            raise ValueError(f"{name}={value}: give at most {most}")
    if width % ranks or layers % 2:
        raise ValueError(f"width={width}, layers={layers}: the width must divide by {ranks} ranks, and the layers come in pairs")
    parameters = {"ways": list(MEASURED), "ranks": ranks, "width": width, "layers": layers}
    total = len(MEASURED) * ranks * len(KINDS)
    return Run("held_by_ranks", parameters, COLUMNS, programs.badge(ranks), total, _points(ranks, width, layers))


def _points(ranks: int, width: int, layers: int) -> Iterator[Row]:
    told = programs.results("shards", ranks, width, layers)
    for way in MEASURED:
        formula = held(way, layers * width * width, ranks)
        by_formula = dict(zip(KINDS, (formula.parameters, formula.gradients, formula.optimizer_state), strict=True))
        for rank, rows in enumerate(told):
            [found] = [row for row in rows if row["way"] == way]
            for kind in KINDS:
                yield {
                    "way": way,
                    "rank": rank,
                    "kind": kind,
                    "bytes": found[kind],
                    "formula": by_formula[kind],
                    "whole": found["whole"],
                }
