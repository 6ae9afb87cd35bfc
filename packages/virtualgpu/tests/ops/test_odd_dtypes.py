"""Unusual dtypes, and outputs on another device, have the answers of an H200."""

import json
import warnings

import pytest

from ...benchmarks.fidelity.odd_dtypes import RECORDED, names, outcome

OUTCOMES = json.loads(RECORDED.read_text(encoding="utf-8"))["outcomes"]
ONE_DEVICE = "RuntimeError: Expected all tensors to be on the same device, but got out is on cuda:0"
# The beginnings of answers that differ: the CPU checks the dtype before its kernel does, and these
# operators with an output consist of others.
DIFFERENT = {
    "e.std()": "RuntimeError: std_var_all: Unsupported dtype Float8_e4m3fn",
    "T.trace(g[None])": "NotImplementedError: \"trace\" not implemented for 'Bool'",
    "F.embedding_bag(i.long(),g[None],i.long())": "RuntimeError: Expected tensor for argument #1",
    "T.split_copy(w(4),2,out=[o(2),o(2)])": ONE_DEVICE,
    "A.embedding.out(w(3,2),T.zeros(2).long(),out=o(2,2))": ONE_DEVICE,
}


@pytest.mark.parametrize("expression", OUTCOMES)
def test_the_answer_is_that_of_an_h200(shared_machine, expression):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about complex32, sparse tensors and RMS norm
        found = outcome(expression, names())
    if expression in DIFFERENT:
        assert found.startswith(DIFFERENT[expression])
    else:
        assert found == OUTCOMES[expression]
