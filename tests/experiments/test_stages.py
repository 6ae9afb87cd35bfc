"""A pipeline of torch.distributed.pipelining on real ranks, beside lesson 04's own schedules."""

import pytest
import torch
from torch import nn

from labkit.experiments import collect, pipelining
from labkit.experiments.schedules import FORWARD, order

pytestmark = pytest.mark.slow


@pytest.mark.xfail(torch.__version__ < (2, 7), reason="torch 2.6's schedules detach a view in place")
def test_two_ranks_keep_to_the_schedules_and_find_the_gradients_of_one_process():
    result = collect(pipelining(ranks=2, micro_batches=4))
    for row in result.rows:
        due = order(row["schedule"], row["rank"], 2, 4)
        assert row["order"] == "".join("F" if work == FORWARD else "B" for work, _ in due)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    x = torch.linspace(-1, 1, 32 * 16).reshape(32, 16)
    parts = list(zip(x.chunk(4), x.sin().chunk(4), strict=True))
    loss = sum(nn.functional.mse_loss(model(part), target) for part, target in parts) / len(parts)
    loss.backward()
    norms = [parameter.grad.norm().item() for parameter in model.parameters()]
    for schedule in ("GPipe", "1F1B"):
        assert [norm for norms in result.column("gradients", schedule=schedule) for norm in norms] == pytest.approx(norms, rel=1e-4)
        assert result.column("loss", schedule=schedule) == [None, pytest.approx(loss.item(), rel=1e-5)]


@pytest.mark.parametrize(("asked", "message"), [({"ranks": 1}, "choose 2 to 8"), ({"micro_batches": 3}, "choose 2, 4, 8, 16, 32")])
def test_what_makes_no_pipeline_is_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        pipelining(**asked)
