"""What DistributedDataParallel sends in a step, and when."""

import pytest

from labkit.experiments import collect, ddp_messages

pytestmark = pytest.mark.slow


def test_buckets_leave_while_gradients_are_computed_and_no_sync_sends_once():
    result = collect(ddp_messages())
    one_batch, each_time, once = result.column("events")
    assert one_batch == [
        ["gradient", "3.weight"],
        ["gradient", "2.weight"],
        ["message", "3.weight 2.weight"],
        ["gradient", "1.weight"],
        ["gradient", "0.weight"],
        ["message", "1.weight 0.weight"],
    ]
    assert each_time == 4 * one_batch
    assert once == 3 * [event for event in one_batch if event[0] == "gradient"] + one_batch
    assert result.column("messages") == [2, 8, 2]
    assert max(result.column("difference")) < 1e-5
