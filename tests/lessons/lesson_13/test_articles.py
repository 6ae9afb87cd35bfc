"""Test that no snippet of the four articles is missing, and that each claim is complete."""

import ast
from collections import Counter

import pytest

from gpulessons.lesson_13 import articles
from gpulessons.lesson_13.articles import ORDER, VERDICTS, Claim

CLAIMS = articles.claims()

# For every snippet of the articles, by section, the line that no other snippet has. The repository
# does not contain the articles' text.
SNIPPETS = {
    "shared_gpu_memory": {
        "1. Initialize the Shared Buffer": ["shared_buf = torch.cuda._get_shared_mem(1024)"],
        "2. Create a PyTorch Device Object": [
            "device = torch.device('cuda:0', shared_buf=shared_buf)"
        ],
        "3. Move Data to the Shared Buffer": ["data_shared = data.to(device)"],
        "4. Perform Computation on the Shared Buffer": [
            "output = torch.matmul(data_shared, data_shared.T)"
        ],
        "Example Use Case": [
            "shared_buf = torch.cuda._get_shared_mem(1024)",
            "data_shared = data.to(device)",
        ],
    },
    "memory_and_multiple_gpus": {
        "Moving tensors around CPU and GPUs": ["a = torch.zeros(4,3)"],
        "The cuda(n) function": ['clf.to(torch.device("cuda:0") # or clf = clf.cuda()'],
        "Automatic selection of GPU": [
            "b = torch.tensor(a.shape).to(dev)",
            "torch.cuda.set_device(0)",
            "newOnes = ones.new_ones((3,4))",
        ],
        "Data Parallelism": [
            "parallel_net = nn.DataParallel(myNet, gpu_ids = [0,1,2])",
            "loss.mean().backward()",
            "parallel_net = parellel_net.to(0)",
        ],
        "Model Parallelism": ["class model_parallel(nn.Module):"],
        "Tracking the amount of memory with GPUtil": [
            "pip install GPUtil",
            "GPUtil.showUtilization()",
        ],
        "Dealing with memory losses using del keyword": ["i = x", "del out, loss"],
        "Using Python data types instead of 1-D tensors": [
            "total_loss += iter_loss",
            "total_loss += iter_loss.item)",
        ],
        "Emptying CUDA cache": [
            "torch.cuda.empy_cache()",
            "from GPUtil import showUtilization as gpu_usage",
        ],
        "Using torch.no_grad() for inference": ["with torch.no_grad()"],
        "Using CuDNN Backend": ["torch.backends.cudnn.benchmark = True"],
        "Using 16-bit Floats": ["input = input.half()", "if isinstance(layer, nn.BatchNorm2d):"],
    },
    "gpu_acceleration": {
        "Efficient Tensor Operations with GPU Acceleration": ["x = x.to('cuda')"],
        "Using Parallel Processing with PyTorch for GPU Acceleration": [
            "model = nn.DataParallel(model)"
        ],
        "Managing GPU Memory for Deep Learning Tasks": [
            "torch.cuda.empty_cache()",
            "max_cached = torch.cuda.max_memory_cached()",
            "torch.cuda.set_enabled_lms(True)",
        ],
        "Neural Network Training with GPU Acceleration": [
            "criterion = criterion.to('cuda')",
            "optimizer = optimizer.to('cuda')",
        ],
        "Implementation of GPU Acceleration in PyTorch for Tensor Operations": ["z = x + y"],
    },
    "speed_up_pytorch": {
        "2. How to check the availability of cuda?": ["torch.cuda.is_available()"],
        "3. How to get more info on your cuda devices?": [
            "import pycuda.driver as cuda",
            "torch.cuda.get_device_name(0)",
            "torch.cuda.memory_cached()",
            "torch.cuda.empty_cache()",
        ],
        "4. How to store Tensors and run Models on GPU?": [
            "a = torch.DoubleTensor([1., 2.])",
            "a = torch.FloatTensor([1., 2.]).cuda()",
            "a = torch.cuda.FloatTensor([1., 2.])",
            "a.get_device()",
            "sq = nn.Sequential(",
            "model = sq.cuda()",
            "next(model.parameters()).is_cuda",
        ],
        "5. How to select and work on GPU(s) if you have multiple of them?": [
            "x = torch.Tensor([1., 2.], device=cuda1)",
            "x = torch.Tensor([1., 2.]).to(cuda1)",
            "torch.cuda.set_device(2)",
            'os.environ["CUDA_VISIBLE_DEVICES"] = "0,2"',
            "z = x + y",
            "A = torch.empty((100, 100), device=cuda).normal_(0.0, 1.0)",
        ],
        "6. Data Parallelism?": [
            "replicas = nn.parallel.replicate(module, device_ids)",
            "model = nn.DataParallel(model, device_ids=device_ids)",
        ],
        "8. torch.multiprocessing": ["p = mp.Process(target=train, args=(model,))"],
    },
}
LISTED = []
for article, sections in SNIPPETS.items():
    for section, lines_of_code in sections.items():
        LISTED += [(article, section, line) for line in lines_of_code]
WORDS = 50  # of a claim: a sentence at most

each_claim = pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)


def lines(claim: Claim) -> list[str]:
    return [line.strip() for line in claim.code.splitlines()]


@pytest.mark.parametrize(("article", "section", "line"), LISTED)
def test_no_snippet_is_missing(article, section, line):
    there = [
        claim for claim in articles.claims(article) if claim.section == section and claim.snippet
    ]
    assert [claim.name for claim in there if line in lines(claim)]


def test_every_snippet_is_listed():
    """Compare the articles with a list of snippets, so that a removed snippet is noticed."""
    told = {(claim.article.name, claim.section): 0 for claim in CLAIMS if claim.snippet}
    assert set(told) == {(article, section) for article, section, _ in LISTED}
    assert sum(claim.snippet for claim in CLAIMS) == len(LISTED)


def test_there_are_enough_claims_of_every_article_with_names_of_their_own():
    assert len(CLAIMS) >= 60
    assert [article.name for article in articles.articles()] == list(ORDER)
    assert Counter(claim.name for claim in CLAIMS).most_common(1)[0][1] == 1
    assert {claim.verdict for claim in CLAIMS} == set(VERDICTS)


@each_claim
def test_a_claim_is_told_in_a_few_words_and_says_why(claim):
    assert 0 < len(claim.says.split()) <= WORDS
    assert claim.why.endswith((".", ")")) and len(claim.why) < 250
    assert claim.code or claim.untried


@each_claim
def test_a_sentence_is_quoted_whole(claim):
    """A part of a sentence may mean something other than the sentence."""
    assert "…" not in claim.says and "..." not in claim.says


@each_claim
def test_what_no_longer_holds_says_what_to_write_or_where_it_stands(claim):
    if claim.verdict != "holds":
        assert claim.today or claim.source or claim.expect.prints, (
            "no way of today, no source, nothing shown"
        )
    if claim.verdict != "holds" and claim.snippet:
        assert claim.today
    if claim.verdict in ("deprecated", "outdated"):
        assert claim.changed or claim.untried


@each_claim
def test_a_verdict_fits_what_running_the_claim_shows(claim):
    """Check that deprecated code runs, and that a typo and an invented name raise an error.

    They may also pass if the claim only says that a feature exists.
    """
    if claim.verdict == "deprecated":
        assert not claim.expect.raises and (claim.expect.warns or claim.expect.may_warn)
    elif claim.verdict == "typo":
        assert claim.expect.raises in ("SyntaxError", "NameError", "TypeError", "AttributeError")
        assert claim.snippet
    elif claim.verdict == "invented":
        assert (
            claim.expect.raises in ("AttributeError", "TypeError")
            or claim.name == "feature named shared memory"
        )


@each_claim
def test_a_version_comes_with_its_source(claim):
    if claim.changed:
        assert claim.source.startswith("https://")


@each_claim
def test_our_own_code_is_python(claim):
    for code in (claim.before, claim.after, claim.today, *([] if claim.snippet else [claim.code])):
        ast.parse(code)


@each_claim
def test_a_claim_that_runs_expects_something(claim):
    for expected in filter(None, (claim.expect, claim.expect_virtual)):
        assert claim.untried or expected.raises or expected.prints or expected.like
        assert not (expected.raises and not expected.message)


def test_claims_are_found_by_name_article_and_verdict():
    assert articles.find("empy_cache").article.title.startswith("PyTorch 101")
    assert [claim.name for claim in articles.claims("gpu_acceleration", "deprecated")] == [
        "max_memory_cached"
    ]
    assert sum(len(articles.claims(verdict=verdict)) for verdict in VERDICTS) == len(CLAIMS)


def test_unknown_names_are_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"no claim 'empty_cach'; near it: .*empy_cache"):
        articles.find("empty_cach")
    with pytest.raises(ValueError, match="choose one of 'shared_gpu_memory', "):
        articles.claims("shared memory")
    with pytest.raises(
        ValueError,
        match="choose one of 'holds', 'deprecated', 'outdated', 'typo', 'invented', 'false'",
    ):
        articles.claims(verdict="true")
