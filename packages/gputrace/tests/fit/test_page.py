"""The page says which GPUs a script fits, what the peak consists of, and which change helps.

The results of attempts are made up.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from gputrace.fit import ScriptFailedError, Wish, answer
from gputrace.fit.changes import CHANGES
from gputrace.fit.outcome import Outcome
from virtualgpu import profiles

WISH = Wish("train.py", [], False, "T4", 4)


def run_by(monkeypatch: pytest.MonkeyPatch, run: Callable[[Wish], Outcome]) -> None:
    """Let the function `run` make the attempts instead of processes."""
    monkeypatch.setattr(
        "gputrace.fit.processes.Runner.run_all",
        lambda runner, wishes: [(wish, run(wish)) for wish in wishes],
    )


@pytest.fixture
def runs(monkeypatch):
    """The list of attempts that were made with a made-up script.

    The script takes 20 GiB. With any change it takes half of that and twice the time.
    """
    asked: list[Wish] = []

    def run(wish: Wish) -> Outcome:
        asked.append(wish)
        need = 20 << 30 if wish.change is None else 10 << 30
        total = wish.memory or {"T4": 15 << 30, "H200": 140 << 30}[wish.like]
        step = 1.0 if wish.change is None else 2.0
        return Outcome(
            total,
            need <= total,
            "",
            "train.py:3 x",
            4,
            need,
            need - 3,
            need - 1,
            {"activations": need - 3},
            step,
            0.25,
            True,
            changes=list(CHANGES),
        )

    run_by(monkeypatch, run)
    return asked


def test_the_page_says_where_the_hosts_speed_comes_from(runs):
    *_, assumed = answer(WISH, ["H200"])
    assert "assumed to be that of the recorded H200s" in assumed
    *_, given = answer(replace(WISH, host=1.5), ["H200"])
    assert "1.5 times as long as on the host of the recorded H200s" in given
    assert "assumed to be that" not in given


@pytest.mark.parametrize(
    ("idle", "host", "error", "waits"),
    [
        (0.05, 1.0, "busy_time_error", "5% of it"),
        (0.5, 1.0, "waiting_time_error", "50% of it, its speed assumed"),
        (0.5, 2.0, "given_host_time_error", "50% of it, its speed given"),
    ],
)
def test_a_time_that_depends_on_the_gpu_alone_is_more_certain(
    monkeypatch, idle, host, error, waits
):
    need = 1 << 30
    parts = need, need, need, {"activations": need}
    run_by(
        monkeypatch,
        lambda wish: Outcome(140 << 30, True, "", "train.py:3 x", 4, *parts, 1.0, idle, True),
    )
    gpus = next(answer(replace(WISH, host=host), ["H100"]))
    assert gpus.rows[0][4:] == (f"1 s ± {getattr(profiles.load('H100'), error):.0%}", waits)


@pytest.mark.parametrize(
    ("loading", "workers", "told"),
    [
        ([0.5], 0, "500 ms on this computer, measured (one batch)."),
        ([0.1, 0.3, 0.2], 0, "200 ms on this computer, measured (median of 3 batches)."),
        ([0.5], 2, "Its 2 workers loaded ahead"),
    ],
)
def test_the_page_says_how_long_loading_a_batch_took(monkeypatch, loading, workers, told):
    outcome = Outcome(15 << 30, steps=4, step=0.1, idle=0.0, loading=loading, workers=workers)
    run_by(monkeypatch, lambda wish: outcome)
    _, remark, *_ = answer(WISH, ["T4"])
    assert told in remark and '"a step takes" leaves it out.' in remark


def test_a_gpu_on_which_it_does_not_fit_is_told_what_it_would_need(runs):
    gpus, parts, changes, notes = answer(WISH, ["T4", "H200"])
    t4, h200 = (f"{profiles.load(name).waiting_time_error:.0%}" for name in ("T4", "H200"))
    waits = "25% of it, its speed assumed"
    assert gpus.rows == (
        ("T4", "15 GiB", "20 GiB", "no", f"1 s ± {t4}, if it had the memory", waits),
        ("H200", "140 GiB", "20 GiB", "yes", f"1 s ± {h200}", waits),
    )
    assert (
        parts.caption
        == "At the peak on the T4, made by train.py:3 x: 20 GiB, of them in tensors and "
        "workspaces 20 GiB"
    )
    assert "assumed to do the same" in notes and "It is assumed to be" in notes
    *tried, lacks = sorted(changes.rows, key=lambda row: row[1] == "")
    assert all(row[1] == "10 GiB" and row[3] == "yes" for row in tried)
    reason = "the T4 has no tensor cores for bfloat16 (compute capability 7.5)"
    assert lacks == ("autocast to bfloat16", "", "", reason)
    assert {row[0]: row[2] for row in changes.rows}["half the batch"] == "4.00 times as long"
    assert tried[-2][0] == "half the batch"  # the slowest, of as many samples
    # faster, on twice as many GPUs
    assert tried[-1] == (
        "sharding over 2 GPUs (FSDP2)",
        "10 GiB",
        "1.00 times as long",
        "yes",
    )
    assert {wish.like for wish in runs if wish.change} == {"T4"}


@pytest.mark.parametrize(
    ("needs", "due", "tried"),
    [
        (
            {2: 18, 4: 12, 8: 9},
            ("sharding over 4 GPUs (FSDP2)", "12 GiB", "0.30 times as long", "yes"),
            [2, 4],
        ),
        (
            {2: 40, 4: 30, 8: 20},
            ("sharding over 8 GPUs (FSDP2)", "20 GiB", "0.15 times as long", "no"),
            [2, 4, 8],
        ),
        ({2: 0}, ("sharding over 2 GPUs (FSDP2)", "", "", "train.py:7 x: RuntimeError: why"), [2]),
        (
            {2: None},
            (
                "sharding over 2 GPUs (FSDP2)",
                "",
                "",
                "no module has the parameters of an optimizer of torch.optim",
            ),
            [2],
        ),
    ],
)
def test_it_is_sharded_over_as_few_gpus_as_it_fits(monkeypatch, needs, due, tried):
    asked = []

    def run(wish: Wish) -> Outcome:
        if not (wish.change or "").startswith("sharding"):
            return Outcome(
                15 << 30, wish.memory is not None, "", "", 4, 50 << 30, 1, 1, {}, 1.0, 0.0, False
            )
        asked.append(int(wish.change.split()[2]))
        need = needs[asked[-1]]
        failed = "train.py:7 x: RuntimeError: why" if need == 0 else ""
        return Outcome(
            1 << 42, True, failed, "", 4, (need or 0) << 30, 1, 1, {}, 1.2, 0.0, need is not None
        )

    run_by(monkeypatch, run)
    *_, changes, _ = answer(WISH, ["T4"])
    assert asked == tried and due in changes.rows and len(changes.rows) == len(CHANGES) + 1


def test_whoever_waits_is_told_a_line_for_each_thing_tried(runs):
    lines: list[str] = []
    page = answer(WISH, ["T4", "H200"], lines.append)
    next(page)
    assert lines == [
        "train.py runs for at least 4 steps on each GPU model. Then each change is tried on "
        "the model that is fullest.",
        "T4: memory runs out",
        "H200: needs 20 GiB, a step takes 1 s",
        "T4, if it had the memory: needs 20 GiB, a step takes 1 s",
    ]
    list(page)
    assert (
        len(lines) == 1 + len(runs)
        and "T4, half the batch: needs 10 GiB, a step takes 2 s" in lines
    )


def test_a_change_that_would_meet_nothing_is_not_run(monkeypatch):
    asked = []

    def run(wish: Wish) -> Outcome:
        asked.append(wish.change)
        return Outcome(
            15 << 30, True, "", "", 4, 1 << 30, 1, 1, {}, 1.0, 0.0, True, changes=["half the batch"]
        )

    run_by(monkeypatch, run)
    *_, changes, _ = answer(WISH, ["T4"])
    assert asked == [None, "half the batch", "sharding over 2 GPUs (FSDP2)"]
    without = {row[0]: row[3] for row in changes.rows if not row[1]}
    assert without == {
        name: change.nothing for name, change in CHANGES.items() if name != "half the batch"
    }
    assert len(changes.rows) == len(CHANGES) + 1


def test_bad_wishes_are_refused_before_anything_runs(runs):
    with pytest.raises(ValueError, match="no profile of a GPU named 'T5'. Choose one of T4, L4"):
        next(answer(WISH, ["T4", "T5"]))
    with pytest.raises(ValueError, match="--steps 2: expected 3 or more"):
        next(answer(Wish("train.py", [], False, "T4", 2), ["T4"]))
    with pytest.raises(ValueError, match=r"host=0: give the time of the host"):
        next(answer(Wish("train.py", [], False, "T4", 4, host=0), ["T4"]))
    assert not runs


def test_a_time_that_nobody_compared_says_so(monkeypatch):
    ran = Outcome(24 << 30, True, "", "", 4, 1 << 30, 1 << 30, 1 << 30, {}, 1.0, 0.0, True)
    run_by(monkeypatch, lambda wish: ran)
    gpus, *_ = answer(WISH, ["RTX 4090"])
    assert gpus.rows[0][4] == "1 s, never compared"


def test_without_a_step_of_an_optimizer_the_time_is_unknown(monkeypatch):
    ran = Outcome(16 << 30, True, "", "", 0, 1 << 30, 1 << 30, 1 << 30, {}, None, None, True)
    run_by(monkeypatch, lambda wish: ran)
    gpus, *_ = answer(WISH, ["T4"])
    assert gpus.rows[0][4:] == ("unknown", "")
    assert gpus.caption.startswith(
        "train.py: it ended without step() of an optimizer of torch.optim"
    )


def test_a_script_that_asks_for_a_value_after_a_step_gets_its_page(monkeypatch):
    ran = Outcome(
        16 << 30,
        True,
        "",
        "",
        1,
        1 << 30,
        1 << 30,
        1 << 30,
        {},
        None,
        None,
        True,
        0.5,
        "train.py:9 int(x)",
        changes=list(CHANGES),
    )
    run_by(monkeypatch, lambda wish: ran)
    gpus, _, changes, _ = answer(WISH, ["T4"])
    assert gpus.rows[0][2:] == ("at least 1 GiB", "so far", "the first at most 500 ms", "")
    first, second, *_ = gpus.caption.splitlines()
    assert first == "train.py: 1 step on virtual GPUs, without values."
    assert (
        second == "Then train.py:9 int(x) needs a value that nothing computes. What follows is not "
        "counted."
    )
    tried = {row[1:] for row in changes.rows if row[1]}
    assert tried == {("at least 1 GiB", "", "so far")}  # a first step says little about others


def test_lines_that_read_made_up_values_are_named(monkeypatch):
    lines = [f"train.py:{number} int(x)" for number in range(5)]
    ran = Outcome(16 << 30, steps=4, used=1 << 30, step=1.0, idle=0.0, made_up=lines)
    run_by(monkeypatch, lambda wish: ran)
    gpus, *_ = answer(WISH, ["T4"])
    assert gpus.rows[0][3] == "yes"
    assert "These lines read values that nothing computes." in gpus.caption
    assert gpus.caption.splitlines()[-4:] == [
        *(f"   {line}" for line in lines[:3]),
        "   and 2 more",
    ]


def test_bfloat16_is_tried_where_the_gpu_computes_it(runs):
    for name, computes in {"T4": False, "L4": True, "A100": True}.items():
        runs.clear()
        wish = replace(WISH, like=name, memory=15 << 30)
        list(answer(wish, [name]))
        assert ("autocast to bfloat16" in {wish.change for wish in runs}) == computes
        assert "autocast to float16, with GradScaler" in {wish.change for wish in runs}


def test_several_gpus_and_processes_are_mentioned(monkeypatch):
    ran = Outcome(16 << 30, steps=4, used=10 << 30, reserved=4 << 30, step=1.0, idle=0.0)
    ran = replace(ran, others=5 << 30, processes=3, device=1, by_device=[1 << 30, 10 << 30])
    run_by(monkeypatch, lambda wish: ran)
    gpus, parts, *_ = answer(replace(WISH, gpus=2), ["T4"])
    said = gpus.caption.splitlines()
    assert said[1] == 'It has 2 GPUs of each model. "needs" and "fits" are about the fullest.'
    assert said[2] == "It starts 3 processes. Memory is that of all its processes on a GPU."
    assert parts.caption.startswith("At the peak on the T4, on cuda:1: 10 GiB")
    shares = {what: nbytes for nbytes, what in parts.rows}
    assert shares["other processes of the script"] == "5 GiB"
    assert shares["CUDA's context, outside PyTorch's allocator"] == "1 GiB"


def test_a_script_that_fails_gives_no_table(monkeypatch):
    run_by(monkeypatch, lambda wish: Outcome(failed="train.py:1 1 / 0: ZeroDivisionError", steps=2))
    with pytest.raises(
        ScriptFailedError, match="on the T4 the script failed after 2 steps: train.py:1 1 / 0"
    ):
        next(answer(WISH, ["T4"]))


def test_the_parts_add_up_to_what_it_needs(monkeypatch):
    parts = {
        "activations": 5 << 20,
        "in flight": 2 << 20,
        "reserved, not in use": 1 << 20,
        "other": 0,
    }
    line = f"train.py:3 {'x' * 200}"
    run_by(
        monkeypatch,
        lambda wish: Outcome(
            15 << 30, True, "", line, 4, 100 << 20, 7 << 20, 8 << 20, parts, 1.0, 0.0, True
        ),
    )
    _, shown, *_ = answer(WISH, ["T4"])
    assert [row[0] for row in shown.rows] == ["92 MiB", "5 MiB", "2 MiB", "1 MiB"]
    assert [row[1] for row in shown.rows][:2] == [
        "CUDA's context, outside PyTorch's allocator",
        "activations",
    ]
    assert len(shown.caption) < 200 and "xxx …: 100 MiB" in shown.caption


def test_what_cudnn_takes_to_try_its_algorithms_is_said_not_to_be_counted(monkeypatch):
    run_by(
        monkeypatch,
        lambda wish: Outcome(1 << 30, steps=4, used=1, step=1.0, idle=0.0, tries_algorithms=True),
    )
    gpus, *_ = answer(WISH, ["T4"])
    assert (
        "It sets torch.backends.cudnn.benchmark" in gpus.caption and "not counted" in gpus.caption
    )


MIB = 1 << 20


@pytest.fixture
def page(monkeypatch):
    """A function that returns the page for these peaks in MiB, on a T4 and an H200."""

    def of(needs: list[int], **others: object) -> tuple[list, list[str], list[Wish]]:
        asked: list[Wish] = []

        def run(wish: Wish) -> Outcome:
            asked.append(wish)
            total = wish.memory or {"T4": 15 << 30, "H200": 140 << 30}[wish.like]
            fits = max(needs) * MIB <= total
            nbytes = [need * MIB for need in needs]
            outcome = Outcome(
                total,
                fits,
                steps=len(needs) if fits else 5,
                used=max(nbytes),
                changed=True,
                changes=["half the batch"],
            )
            outcome.peaks, outcome.grows = nbytes, "Most come from train.py:3 x"
            return replace(outcome, **others)

        run_by(monkeypatch, run)
        lines: list[str] = []
        return list(answer(WISH, ["T4", "H200"], lines.append)), lines, asked

    return of


def test_a_script_whose_memory_grows_is_told_when_each_gpu_is_full(page):
    (gpus, remarks, _, changes, _), lines, asked = page([100, *range(1024, 8 * 1024, 1024)])
    assert [row[2:4] for row in gpus.rows] == [
        ("at least 7 GiB", "for about 16 steps"),
        ("at least 7 GiB", "for about 140 steps"),
    ]
    assert remarks.splitlines() == [
        "Memory grows by 1 GiB per step (steps 2 to 8 on the T4).",
        "Most come from train.py:3 x.",
        '"fits" says when a GPU is full if the growth goes on.',
    ]
    assert changes.rows[0][3] == "for about 16 steps"
    assert "T4: needs 7 GiB after 8 steps, 1 GiB more per step" in lines
    assert {wish.steps for wish in asked if wish.change} == {8}


def test_growth_that_is_faster_and_faster_and_a_gpu_that_was_full_already(page):
    (gpus, remarks, *_), _, _ = page([1, *(1024 * (1 << step) for step in range(5))])
    assert [row[2:4] for row in gpus.rows] == [
        ("at least 16 GiB", "no, full in step 6"),
        ("at least 16 GiB", "for about 9 steps"),
    ]
    assert remarks.startswith(
        "Memory grows faster and faster: by 8 GiB in the last step, 2.0 times as much as in "
        "the step before (steps 2 to 6 on the T4).\n"
    )


def test_growth_that_fills_no_gpu_in_a_million_steps(page):
    (gpus, remarks, *_), _, _ = page([1, 2, 3, 4], peaks=[512, 1024, 1536, 2048, 2560])
    assert [row[3] for row in gpus.rows] == ["yes, for over a million steps"] * 2
    assert remarks.startswith("Memory grows by 512 B per step")


def test_peaks_that_vary_are_said_to(page):
    (gpus, remarks, *_), _, _ = page([100, 3072, 1024, 2048])
    assert [row[2:4] for row in gpus.rows] == [("3 GiB", "yes")] * 2
    assert remarks.splitlines() == [
        "The peak varies from step to step: 1 GiB to 3 GiB in steps 2 to 4 on the T4.",
        '"needs" is the highest of them. A step with a larger batch needs more.',
    ]


def test_peaks_that_stay_the_same_need_no_remark(page):
    (gpus, parts, changes, notes), _, _ = page([100, 3072, 3072, 3072])
    assert [row[3] for row in gpus.rows] == ["yes"] * 2 and parts.caption and changes.rows and notes
