"""What CUDA answers to unusual dtypes and to outputs on another device.

    python odd_dtypes.py FILE

writes this GPU's outcome of every expression in h200/odd_dtypes.json: the result's dtype, device
and values, or the first line of the error. In the expressions, `h` and `f` are matrices of float16
and float32, and `i`, `g`, `u`, `e`, `z` and `k` are vectors of int32, bool, uint16, float8,
complex64 and complex32. All consist of ones.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

RECORDED = Path(__file__).parent / "h200" / "odd_dtypes.json"


def ones(*size: int, **kwargs: Any) -> torch.Tensor:
    return torch.ones(*size, device="cuda", **kwargs)


def names() -> dict[str, Any]:
    """Return what the expressions refer to."""
    return {
        "T": torch, "F": F, "A": torch.ops.aten, "D": torch.ops.aten.native_dropout_backward,
        "o": ones, "w": torch.ones, "c": "cuda", "math": __import__("math"),
        "G": torch.bool, "H": torch.float16, "I": torch.int32,
        "f": ones(2, 2), "h": ones(2, 2, dtype=torch.float16),
        "i": ones(2, dtype=torch.int32), "g": ones(2, dtype=torch.bool),
        "u": ones(2, dtype=torch.uint16), "e": ones(2).to(torch.float8_e4m3fn),
        "z": ones(2, dtype=torch.complex64), "k": ones(3, dtype=torch.complex32),
    }  # fmt: skip


def outcome(expression: str, known: dict[str, Any]) -> str:
    """Return the result of an expression, or its error, as one line."""
    try:
        result = eval(expression, known)
    except Exception as error:
        return f"{type(error).__name__}: " + str(error).split("\n")[0][:180]
    if isinstance(result, torch.Tensor):
        return f"{result.dtype} {result.device} {result.detach().cpu().tolist()}"
    return str(result)


def main(file: str) -> None:
    known = names()
    expressions = json.loads(RECORDED.read_text(encoding="utf-8"))["outcomes"]
    origin = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    found = {expression: outcome(expression, known) for expression in expressions}
    with open(file, "w") as out:
        json.dump({"origin": origin, "outcomes": found}, out, indent=1)
        out.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
