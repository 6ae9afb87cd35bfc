"""Compiled functions run eagerly."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import virtualgpu
from virtualgpu.eager import SAID

SIZE = 1, 2, 128, 16


@pytest.fixture
def used():
    with virtualgpu.use(1):
        yield


def test_a_compiled_model_is_pytorchs_own_and_runs_eagerly_which_is_said_once(used):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda()
    with pytest.warns(
        UserWarning, match="^torch.compile does not compile .* times are those of eager code$"
    ) as said:
        compiled = torch.compile(model, mode="max-autotune", fullgraph=True)
        torch.compile(torch.sin)
    assert len(said) == 1 and said[0].filename == __file__
    assert compiled._orig_mod is model and list(compiled.state_dict()) == [
        "_orig_mod.0.weight",
        "_orig_mod.0.bias",
    ]
    x = torch.ones(2, 4, device="cuda")
    compiled(x).sum().backward()
    assert torch.equal(compiled(x), model(x)) and model[0].weight.grad.device.type == "cuda"


@pytest.mark.filterwarnings("ignore:torch.compile does not compile")
def test_functions_decorators_and_modules_are_compiled_alike(used):
    @torch.compile(dynamic=True)
    def double(x):
        return 2 * x

    module = nn.Linear(2, 2).cuda()
    module.compile()
    x = torch.ones(1, 2, device="cuda")
    assert double(x).tolist() == [[2.0, 2.0]] and module(x).shape == (1, 2)
    with pytest.raises(TypeError, match="colour"):
        torch.compile(double, colour="red")


@pytest.mark.parametrize("switch", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_pytorchs_own_switches_leave_a_function_as_it_is(switch, used, monkeypatch):
    monkeypatch.setenv(switch, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            torch.compile(torch.sin) is torch.compile(mode="max-autotune")(torch.sin) is torch.sin
        )
    monkeypatch.undo()
    assert torch.compile(torch.sin, disable=True) is torch.sin


@pytest.mark.slow
def test_a_script_with_a_compiled_model_is_not_told_of_packages_that_it_does_not_use(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "compiled = torch.compile(torch.nn.Linear(2, 2).cuda())\n"
        "print(compiled(torch.ones(2, device='cuda')).device)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "virtualgpu", "run", str(script)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (ran.returncode, ran.stdout) == (0, "cuda:0\n")
    assert SAID in ran.stderr and "virtualgpu.use" not in ran.stderr


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:torch.compile does not compile"
)
@pytest.mark.parametrize("values", [True, False])
def test_flex_attention_runs_operator_by_operator(values):
    with virtualgpu.use(1, values=values):
        mask = create_block_mask(
            lambda batch, head, query, key: query >= key, None, None, 128, 128, device="cuda"
        )
        inputs = [torch.randn(SIZE, device="cuda", requires_grad=True) for _ in range(3)]
        others = [x.detach().clone().requires_grad_() for x in inputs]
        with torch.no_grad():
            assert flex_attention(*inputs, block_mask=mask).shape == SIZE
        result = flex_attention(
            *inputs, lambda score, batch, head, query, key: score + 0 * query, block_mask=mask
        )
        expected = nn.functional.scaled_dot_product_attention(*others, is_causal=True)
        result.sum().backward()
        expected.sum().backward()
        assert [x.grad.device.type for x in inputs] == ["cuda"] * 3
        if values:
            torch.testing.assert_close(result, expected)
            torch.testing.assert_close([x.grad for x in inputs], [x.grad for x in others])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_on_the_host_keeps_its_gradient(used):
    inputs = [torch.randn(SIZE, requires_grad=True) for _ in range(3)]
    assert flex_attention(*(x.detach() for x in inputs)).device.type == "cpu"


class Traced(HigherOrderOperator):
    def __call__(self, x):
        return super().__call__(x)


def test_an_operator_on_functions_without_an_eager_form_is_refused_by_name(used):
    with pytest.raises(
        NotImplementedError, match="higher_order.traced is not supported by the virtual GPU"
    ):
        traced = Traced("traced")
        traced.fallthrough(torch._C.DispatchKey.AutogradCPU)
        traced(torch.ones(2, device="cuda"))
