"""Some steps of a script on one virtual GPU: its memory, its times, who waits, and how it fails."""

import textwrap

import pytest

from gputrace.fit.outcome import Wish

TRAIN = """
    import sys, torch
    width, steps = int(sys.argv[1]), int(sys.argv[2])
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(1024, width, device="cuda")
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        print(loss.item())
    print(open("/nowhere"))
"""


@pytest.fixture
def wish(tmp_path):
    """A function that writes a script and returns the wish to run four steps of it on a T4."""

    def of(source: str, *arguments: object, **others: object) -> Wish:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return Wish(
            str(path),
            [str(argument) for argument in arguments],
            False,
            **{"like": "T4", "steps": 4} | others,
        )

    return of


@pytest.mark.slow
def test_it_ends_after_the_steps_and_tells_what_the_peak_consists_of(run, wish):
    outcome = run(wish(TRAIN, 1024, 100))
    assert (outcome.fits, outcome.failed, outcome.steps) == (True, "", 4)
    weights = 8 * (1024 * 1024 + 1024) * 4
    assert outcome.parts["parameters"] == outcome.parts["optimizer state"] == weights
    assert sum(outcome.parts.values()) == outcome.reserved < outcome.used < outcome.total
    assert outcome.line.startswith("train.py:")


LOADS = """
    import sys, torch
    from torch.utils.data import DataLoader, Dataset

    class Pictures(Dataset):
        def __len__(self):
            return 100
        def __getitem__(self, index):
            picture = torch.ones(16)
            for _ in range(int(sys.argv[1])):
                picture = picture + 1
            return picture

    model = torch.nn.Linear(16, 16).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Pictures(), batch_size=2):
        model(batch.cuda()).sum().backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_a_step_s_time_leaves_out_what_a_loader_computes_on_the_cpu(run, wish):
    quick, slow = run(wish(LOADS, 0)), run(wish(LOADS, 500))
    assert quick.step == slow.step
    assert len(quick.loading) == quick.steps == 4
    assert min(quick.loading) > 0 and quick.workers == 0


def test_a_checkpoint_is_not_written_over(run, wish, tmp_path):
    checkpoint = tmp_path / "best.pt"
    checkpoint.write_text("of a real training")
    saving = TRAIN.replace(
        "        print(loss.item())",
        "        if loss.item() < float('inf'): torch.save(model.state_dict(), sys.argv[3])",
    )
    assert run(wish(saving, 16, 9, checkpoint)).steps == 4
    assert checkpoint.read_text() == "of a real training"


@pytest.mark.slow
def test_a_step_of_small_kernels_waits_for_the_host_and_one_of_large_ones_does_not(run, wish):
    small, slow, large = (
        run(wish(TRAIN, 16, 9)),
        run(wish(TRAIN, 16, 9, host=2.0)),
        run(wish(TRAIN, 4096, 9)),
    )
    assert slow.step == pytest.approx(2 * small.step, rel=0.05)
    assert small.idle > 0.5 and large.idle < 0.02
    assert run(wish(TRAIN, 4096, 9, host=2.0)).step == pytest.approx(large.step, rel=0.02)


@pytest.mark.slow
def test_what_does_not_fit_is_told_from_what_fails(run, wish):
    tight = run(wish(TRAIN, 8192, 9, memory=4 << 30))
    assert (tight.fits, tight.failed) == (False, "")
    failed = run(wish(TRAIN, 16, 2))
    assert (
        failed.fits
        and failed.failed.startswith("train.py:13 print(open(")
        and "FileNotFoundError" in failed.failed
    )
    assert run(wish("import sys; sys.exit(3)")).failed.endswith(
        "import sys; sys.exit(3): it ended by sys.exit(3)"
    )
    assert "os._exit" not in (
        ended := run(wish("import os; print('last words', flush=True); os._exit(5)")).failed
    )
    assert ended == "its process ended with status 5: last words"


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_a_script_that_asks_for_a_value_after_whole_steps_is_told_up_to_that_line(run, wish, steps):
    asks = TRAIN.replace('print(open("/nowhere"))', "x.argmax(1).bincount()")
    outcome, whole = run(wish(asks, 4096, steps)), run(wish(TRAIN, 4096, 9))
    assert (outcome.fits, outcome.failed, outcome.steps, outcome.asked) == (
        True,
        "",
        steps,
        "train.py:13 x.argmax(1).bincount()",
    )
    if steps == 1:
        # no optimizer's state lies beside a backward's tensors yet
        assert outcome.allocated < whole.allocated
        assert outcome.step is None and 0.5 * whole.step < outcome.first < 2 * whole.step
    else:
        assert outcome.allocated == whole.allocated
        assert outcome.first is None and outcome.step == pytest.approx(whole.step, rel=0.02)


@pytest.mark.slow
def test_an_integer_that_a_script_prints_after_a_step_is_made_up_and_it_goes_on(run, wish):
    samples = TRAIN.replace(
        "print(loss.item())",
        "print([0, 1][int(loss.argmax())], (loss > 0).cpu().sum().item(), loss.argmax().cpu())",
    )
    outcome, whole = run(wish(samples, 4096, 9)), run(wish(TRAIN, 4096, 9))
    assert (outcome.fits, outcome.failed, outcome.steps, outcome.asked) == (True, "", 4, "")
    [line] = outcome.made_up
    assert line.startswith("train.py:12 print([0, 1][int(loss.argmax())]") and not whole.made_up
    assert outcome.allocated == whole.allocated and outcome.step == pytest.approx(
        whole.step, rel=0.02
    )


@pytest.mark.slow
@pytest.mark.parametrize("line", ["while not loss.argmax(): pass", "[][int(loss.argmax())]"])
def test_where_a_made_up_value_leads_nowhere_a_script_is_told_up_to_its_line(run, wish, line):
    outcome = run(wish(TRAIN.replace("print(loss.item())", line), 16, 9))
    assert (outcome.fits, outcome.failed, outcome.steps, outcome.asked) == (
        True,
        "",
        1,
        f"train.py:12 {line}",
    )


READS = """
    best, counted = float("inf"), []
    def reads(x, loss):
        global best
        counted.append((x.argmax(1) == 0).sum().item())
        assert loss < 10 and (x < 9).all(), "a check of the values"
        if loss > 100 or not torch.isfinite(loss) or not 0 < loss.item() < 1:
            raise SystemExit(1)
        assert not loss > 20
        best = min(best, loss)
        print(f"{loss} {loss:.2f}", round(loss.item()), 1 / loss.item(), loss.tolist())
        x[x > 0], x[x.nonzero()[:, 0]], x.masked_select(x < 0), loss[loss > 0], x.flatten().unique()
"""


@pytest.mark.slow
def test_a_script_may_read_values_before_its_first_step(run, wish):
    """The memory does not change, and the page names the lines that read values."""
    reads = TRAIN.replace("loss.backward()", "reads(x, loss); loss.backward()")
    reads = reads.replace("    import sys, torch", f"    import sys, torch{READS}", 1)
    outcome, whole = run(wish(reads, 64, 9)), run(wish(TRAIN, 64, 9))
    assert (outcome.fits, outcome.failed, outcome.asked) == (True, "", "")
    assert outcome.parts["optimizer state"] == whole.parts["optimizer state"]
    expected = ["counted.append", "assert loss", "if loss", "assert not", "best = min", "x[x > 0]"]
    for line, begins in zip(outcome.made_up, expected, strict=True):
        assert line.partition(" ")[2].startswith(begins)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "why", "instead"),
    [
        ("x.repeat_interleave(x.argmax(1), 0)", "needs", "Pass output_size= to repeat_interleave."),
        ("x.argmax(1).bincount()", "needs", "Count on the CPU: pass a CPU tensor to bincount."),
        ("x.view(int(x.argmax()), -1)", "needs", "Pass a number that is not a result of the GPU"),
        ("while not x.argmax(): pass", "waits for", "Limit the loop by a number of iterations."),
        ("assert x.argmax() == 3", "needs", "Set the environment variable PYTHONOPTIMIZE=1"),
    ],
)
def test_a_line_that_cannot_do_without_a_value_is_named(run, wish, line, why, instead):
    script = TRAIN.replace(
        'torch.ones(1024, width, device="cuda")', 'torch.randn(64, width, device="cuda")'
    )
    failed = run(wish(script.replace("loss.backward()", line), 16, 2)).failed
    if line.startswith("assert"):
        assert not failed.startswith("train.py:10")  # an assert is taken to hold
    else:
        assert failed.startswith(
            f"train.py:10 {line} {why} a value that nothing computes. {instead}"
        )


@pytest.mark.slow
def test_a_long_inference_is_measured_so_far(run, wish):
    """A script that reads a number for each sample does not count as waiting."""
    infer = """
        import torch
        model, right = torch.nn.Linear(64, 64).cuda(), 0
        for _ in range(1_000_000):
            right += (model(torch.ones(1, 64, device="cuda")).argmax() == 3).item()
    """
    outcome = run(wish(infer))
    assert (outcome.failed, outcome.steps, outcome.fits) == ("", 0, True)
    assert outcome.asked.startswith("train.py:5 right +=") and outcome.parts["parameters"]


@pytest.mark.slow
def test_an_error_that_has_nothing_to_do_with_values_is_told_as_it_is(run, wish):
    failed = run(
        wish(TRAIN.replace("loss.backward()", "print(loss.item()); open('/nowhere')"), 16, 2)
    ).failed
    assert failed.endswith("FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'")
    assert "nothing computes" not in failed


@pytest.mark.slow
def test_the_fullest_gpu_is_measured(run, wish):
    two = TRAIN.replace(".cuda()", '.to("cuda:1")').replace('device="cuda"', 'device="cuda:1"')
    outcome, whole = run(wish(two, 1024, 9, gpus=2)), run(wish(TRAIN, 1024, 9))
    assert (outcome.device, outcome.steps, outcome.allocated) == (1, 4, whole.allocated)
    assert outcome.parts == whole.parts and outcome.step == pytest.approx(whole.step, rel=0.02)
    assert outcome.by_device[1] == outcome.used > outcome.by_device[0]


@pytest.mark.slow
def test_a_script_that_leaves_the_gpu_alone_is_told_so(run, wish):
    outcome = run(wish(TRAIN.replace(".cuda()", "").replace(', device="cuda"', ""), 16, 9))
    assert outcome.failed.startswith("it put nothing on the GPU. It may need an option")
    assert outcome.steps == 0  # nobody waits for steps on the CPU


@pytest.mark.slow
def test_a_long_message_is_told_in_a_line(run, wish):
    failed = run(wish('raise ValueError("one\\ntwo\\nthree")')).failed
    assert failed.endswith("ValueError: one … three") and "\n" not in failed


@pytest.mark.slow
def test_where_no_optimizer_steps_there_is_memory_and_no_step_time(run, wish):
    by_hand = TRAIN.replace(
        "optimizer.step()", "[p.data.add_(p.grad, alpha=-0.1) for p in model.parameters()]"
    ).replace("print(open", "print(str")
    outcome = run(wish(by_hand, 64, 3))
    assert (outcome.failed, outcome.steps, outcome.step) == ("", 0, None) and outcome.parts[
        "parameters"
    ] > 0


@pytest.mark.slow
def test_an_evaluation_between_two_steps_is_no_part_of_a_step(run, wish):
    evaluates = TRAIN.replace("print(loss.item())", "_ or [model(x) for _ in range(50)]")
    assert run(wish(evaluates, 4096, 9)).step == pytest.approx(
        run(wish(TRAIN, 4096, 9)).step, rel=0.02
    )


@pytest.mark.slow
def test_of_several_optimizers_the_first_ones_steps_count(run, wish):
    two = TRAIN.replace("optimizer.step()", "optimizer.step(); other.step()").replace(
        "    x =", "    other = torch.optim.SGD(model[0].parameters(), lr=0.1)\n    x ="
    )
    outcome = run(wish(two, 64, 9))
    # not half of that
    assert outcome.steps == 4 and outcome.step == pytest.approx(
        run(wish(TRAIN, 64, 9)).step, rel=0.25
    )


@pytest.mark.slow
def test_where_no_optimizer_is_made_each_backward_counts_as_a_step(run, wish):
    """`fit` stops such a script after some steps, which only lack the optimizer's update."""
    stepped = TRAIN.replace(", momentum=0.9", "").replace(
        "zero_grad()", "zero_grad(set_to_none=False)"
    )
    by_hand = stepped.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", "")
    by_hand = by_hand.replace(
        "optimizer.zero_grad(set_to_none=False)",
        "[p.grad.zero_() for p in model.parameters() if p.grad is not None]",
    )
    by_hand = by_hand.replace(
        "optimizer.step()", "[p.data.add_(p.grad, alpha=-0.1) for p in model.parameters()]"
    )
    outcome, with_optimizer = run(wish(by_hand, 4096, 10**6)), run(wish(stepped, 4096, 9))
    assert (
        outcome.fits,
        outcome.failed,
        outcome.steps,
        outcome.by_hand,
        with_optimizer.by_hand,
    ) == (True, "", 4, True, False)
    assert outcome.allocated == with_optimizer.allocated
    assert outcome.step == pytest.approx(with_optimizer.step, rel=0.1)


@pytest.mark.parametrize("tries", [True, False])
def test_a_script_may_let_cudnn_try_its_algorithms(run, wish, tries):
    script = TRAIN.replace("x = torch", f"torch.backends.cudnn.benchmark = {tries}\n    x = torch")
    assert run(wish(script, 64, 3)).tries_algorithms == tries
