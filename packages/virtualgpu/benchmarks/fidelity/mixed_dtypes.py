"""What CUDA answers to operands of two dtypes: `python mixed_dtypes.py FILE` writes the outcome of each case on this machine's GPU.

A half-precision layer that is given float32 is the mistake that everyone makes once. Each case is an operator or a layer of PyTorch's in
float16 or bfloat16 with an operand in float32; its outcome is the result's dtype and shape, or the error.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def outcome(function: Callable[[], Any]) -> str:
    try:
        result = function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    result = result[0] if isinstance(result, tuple) else result
    return f"{result.dtype} {tuple(result.shape)}"


def cases(low: torch.dtype) -> dict[str, Callable[[], Any]]:
    def on(layer: nn.Module) -> nn.Module:
        return layer.to("cuda", low)

    def randn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=dtype)

    x, rows, images, heads = randn(4, 8), randn(4, 5, 8), randn(2, 8, 6, 6), randn(2, 2, 5, 8)
    weights = randn(8, 3, dtype=low)
    return {
        "linear": lambda: on(nn.Linear(8, 3))(x),
        "linear without bias": lambda: on(nn.Linear(8, 3, bias=False))(x),
        "linear of rows": lambda: on(nn.Linear(8, 3))(rows),
        "linear of rows without bias": lambda: on(nn.Linear(8, 3, bias=False))(rows),
        "float32 linear": lambda: nn.Linear(8, 3).cuda()(x.to(low)),
        "float64 linear": lambda: nn.Linear(8, 3).to("cuda", torch.float64)(x),
        "bilinear": lambda: on(nn.Bilinear(8, 8, 3))(x, x),
        "lstm": lambda: on(nn.LSTM(8, 3))(rows),
        "gru": lambda: on(nn.GRU(8, 3))(rows),
        "rnn": lambda: on(nn.RNN(8, 3))(rows),
        "lstm cell": lambda: on(nn.LSTMCell(8, 3))(x),
        "gru cell": lambda: on(nn.GRUCell(8, 3))(x),
        "conv1d": lambda: on(nn.Conv1d(5, 3, 3))(rows),
        "conv2d": lambda: on(nn.Conv2d(8, 3, 3))(images),
        "conv2d without bias": lambda: on(nn.Conv2d(8, 3, 3, bias=False))(images),
        "conv3d": lambda: on(nn.Conv3d(2, 3, 3))(randn(2, 2, 5, 5, 5)),
        "conv transposed": lambda: on(nn.ConvTranspose2d(8, 3, 3))(images),
        "multi-head attention": lambda: on(nn.MultiheadAttention(8, 2, batch_first=True))(rows, rows, rows),
        "multi-head attention, eval": lambda: on(nn.MultiheadAttention(8, 2, batch_first=True)).eval()(rows, rows, rows),
        "encoder layer": lambda: on(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))(rows),
        "attention, query": lambda: F.scaled_dot_product_attention(heads.to(low), heads, heads),
        "attention, value": lambda: F.scaled_dot_product_attention(heads, heads, heads.to(low)),
        "layer norm": lambda: on(nn.LayerNorm(8))(x),
        "group norm": lambda: on(nn.GroupNorm(2, 8))(images),
        "batch norm": lambda: on(nn.BatchNorm2d(8))(images),
        "instance norm": lambda: on(nn.InstanceNorm2d(8, affine=True))(images),
        "rms norm": lambda: on(nn.RMSNorm(8))(x),
        "prelu": lambda: on(nn.PReLU())(x),
        "mm": lambda: x @ weights,
        "matmul of rows": lambda: rows @ weights,
        "bmm": lambda: torch.bmm(rows, rows.transpose(1, 2).to(low)),
        "addmm, matrix": lambda: torch.addmm(randn(3), x, weights),
        "addmm, sum": lambda: torch.addmm(randn(3, dtype=low), x, randn(8, 3)),
        "baddbmm": lambda: torch.baddbmm(randn(1, dtype=low), rows, rows.transpose(1, 2)),
        "addbmm": lambda: torch.addbmm(randn(5, 5, dtype=low), rows, rows.transpose(1, 2)),
        "einsum": lambda: torch.einsum("ij,jk->ik", x, weights),
        "mv": lambda: torch.mv(x, randn(8, dtype=low)),
        "dot": lambda: torch.dot(x[0], x[1].to(low)),
        "outer": lambda: torch.outer(x[0], x[1].to(low)),
        "mse loss": lambda: F.mse_loss(x, x.to(low)),
        "cross entropy": lambda: F.cross_entropy(x.to(low), torch.zeros(4, dtype=torch.long, device="cuda")),
        "cdist": lambda: torch.cdist(x, x.to(low)),
        "lerp": lambda: torch.lerp(x, x.to(low), 0.5),
        "index_put_": lambda: x.clone().index_put_((torch.tensor([0], device="cuda"),), x[0].to(low)),
    }


def main(file: str) -> None:
    origin = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda}
    found = {str(low).removeprefix("torch."): {name: outcome(run) for name, run in cases(low).items()} for low in (torch.float16, torch.bfloat16)}
    with open(file, "w") as out:
        json.dump({"origin": origin, "outcomes": found}, out, indent=1)
        out.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
