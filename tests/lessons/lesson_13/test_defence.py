"""A verdict of one's own is drawn if its experiment decides. Otherwise the reason is told."""

import re

import pytest
import torch

import labkit
from gpulessons.lesson_13 import articles
from gpulessons.lesson_13.defence import defend
from gpulessons.lesson_13.labs import try_claim
from gpulessons.lesson_13.stand_ins import ALLOCATED, GATHER, MOVE, REPLICATE, SENTENCES

QUOTE = "Returned Tensor shares the same storage with the original one."


@pytest.fixture(autouse=True)
def gpus():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        yield


@pytest.fixture
def outcomes():
    return {articles.find(name): try_claim(name) for name in ("empy_cache", "new_ones")}


def shares(detach):
    x = torch.ones(3, device="cuda")
    return detach(x).data_ptr() == x.data_ptr()


def test_a_verdict_whose_experiment_decides_is_drawn_among_the_others(outcomes, capsys):
    drawn = defend(QUOTE, "holds", shares, torch.Tensor.detach, torch.clone, among=outcomes)
    assert "Yours: 1 holds" in drawn.alt
    assert "True for the subject, False for the opposite" in capsys.readouterr().out


def test_an_experiment_that_cannot_fail_is_refused(outcomes, capsys):
    def weak(detach):
        return detach(torch.ones(3, device="cuda")).is_cuda

    assert defend(QUOTE, "holds", weak, torch.Tensor.detach, torch.clone, among=outcomes) is None
    assert (
        "Refused: the experiment returns True for the subject and for its opposite"
        in capsys.readouterr().out
    )


def test_the_sentence_and_its_opposite_may_not_get_the_same_verdict(outcomes, capsys):
    """The verdict "false" needs False for the subject and True for the opposite."""
    assert defend(QUOTE, "false", shares, torch.Tensor.detach, torch.clone, among=outcomes) is None
    assert "the verdict false needs False" in capsys.readouterr().out
    assert (
        defend(QUOTE, "false", shares, torch.clone, torch.Tensor.detach, among=outcomes) is not None
    )


def test_the_experiment_does_not_see_which_function_it_gets(outcomes, capsys):
    def knows(function):
        function(torch.ones(3, device="cuda"))
        return function is torch.Tensor.detach or getattr(function, "__name__", "") == "detach"

    assert defend(QUOTE, "holds", knows, torch.Tensor.detach, torch.clone, among=outcomes) is None
    assert "returns False for the subject and for its opposite" in capsys.readouterr().out


def test_an_error_of_the_experiment_is_told(outcomes, capsys):
    def fails(detach):
        return detach(torch.ones(3, device="cuda")).empty_cache()

    assert defend(QUOTE, "holds", fails, torch.Tensor.detach, torch.clone, among=outcomes) is None
    assert "with the subject, the experiment raised AttributeError" in capsys.readouterr().out


def gathers(gather):
    """Return whether a function joins the rows of two tensors on GPU 0."""
    first = torch.zeros(1, 2, device="cuda:0")
    second = torch.ones(2, 2, device="cuda:1")
    return gather([first, second], 0).tolist() == [[0, 0], [1, 1], [1, 1]]


def gather_first(tensors, device):
    return tensors[0].to(device)


@pytest.mark.parametrize(
    "quote", [GATHER, GATHER.removeprefix("Gather: "), f"The article says: {GATHER}"]
)
def test_a_sentence_that_holds_gets_no_other_verdict_by_a_subject_that_is_broken(
    outcomes, capsys, quote
):
    gather = torch.nn.parallel.gather
    assert defend(quote, "false", gathers, gather_first, gather, among=outcomes) is None
    assert "the verdict false comes from the subject" in capsys.readouterr().out
    assert defend(quote, "holds", gathers, gather, gather_first, among=outcomes) is not None


@pytest.mark.parametrize("claim", articles.claims(), ids=lambda claim: claim.name)
def test_no_part_of_a_judged_sentence_gets_another_verdict(outcomes, capsys, claim):
    quote = " ".join(claim.says.split()[1:])
    assert defend(quote, "holds", shares, torch.Tensor.detach, torch.clone, among=outcomes) is None
    assert re.search("has a verdict on this sentence|whole sentence", capsys.readouterr().out)


def test_an_experiment_by_chance_is_refused(outcomes, capsys):
    tosses = iter([True, False, False, True, True, False, True, True])

    def chance(detach):
        detach(torch.ones(3, device="cuda"))
        return next(tosses)

    assert defend(QUOTE, "holds", chance, torch.Tensor.detach, torch.clone, among=outcomes) is None
    assert (
        "with the opposite, the experiment returned False and then True" in capsys.readouterr().out
    )


def test_a_tensor_that_was_made_before_is_a_use_of_the_gpu(outcomes, capsys):
    x = torch.ones(3, device="cuda")

    def same_memory(detach):
        return detach(x).data_ptr() == x.data_ptr()

    assert (
        defend(QUOTE, "holds", same_memory, torch.Tensor.detach, torch.clone, among=outcomes)
        is not None
    )
    x = x.cpu()
    assert (
        defend(QUOTE, "holds", same_memory, torch.Tensor.detach, torch.clone, among=outcomes)
        is None
    )
    assert "uses no tensor on a GPU" in capsys.readouterr().out


def test_the_sentences_with_stand_ins_have_no_verdict_yet():
    judged = [claim.says for claim in articles.claims()]
    assert list(SENTENCES) == [MOVE, GATHER, REPLICATE]
    assert not any(sentence in says for sentence in SENTENCES for says in judged)


def test_stand_ins_of_memory_differ_from_each_other():
    """Two stand-ins that always agree would test the same property twice."""
    kept = torch.empty(3 << 20, dtype=torch.uint8, device="cuda:1")
    for _ in range(2):
        torch.empty(5 << 20, dtype=torch.uint8, device="cuda:1")  # stays in the cache
    torch.empty(9 << 20, dtype=torch.uint8, device="cuda:0")
    functions = ALLOCATED.holds | ALLOCATED.fails
    answers = {
        does: tuple(function(gpu) for gpu in ("cuda:0", "cuda:1"))
        for does, function in functions.items()
    }
    torch.cuda.set_device(1)
    answers = {does: (*said, functions[does]("cuda:0")) for does, said in answers.items()}
    assert len(kept) and len(set(answers.values())) == len(answers)
