"""Recurrent layers run as one cuDNN operator, with its buffers, and agree with the CPU."""

import pytest
import torch
from recorded import check
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from labkit.vgpu import hardware

NAMES = (
    "shared/lstm", "shared/gru", "shared/rnn_cell", "shared/lstm_cell", "more/lstm1", "more/lstm2", "more/lstm_bi",
    "more/gru2", "more/rnn1", "more/lstm_half", "more/lstm_eval", "more/lstm_cell", "more/gru_cell",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_allocations_are_those_of_an_h200(name, machine):
    check(name)


def test_dropout_keeps_a_state_for_good(machine):
    gpu = hardware.machine().gpu("cuda:0")
    check("more/lstm_drop")
    state = gpu.libraries.pop("cudnn dropout")
    assert state.requested == 49152 * 132
    gpu.allocator.free(state)


def pair(kind, *sizes, **options):
    plain = kind(*sizes, **options)
    moved = kind(*sizes, **options)
    moved.load_state_dict(plain.state_dict())
    return plain, moved.cuda()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}])
def test_values_agree_with_the_cpu(kind, options, machine):
    plain, moved = pair(kind, 3, 4, **options)
    x = torch.randn(5, 2, 3, requires_grad=True)
    y = x.detach().cuda().requires_grad_()
    expected, got = plain(x)[0], moved(y)[0]
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(got.cpu(), expected)
    torch.testing.assert_close(y.grad.cpu(), x.grad)
    for a, b in zip(moved.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad)


def test_packed_sequences_agree_with_the_cpu(machine):
    plain, moved = pair(nn.LSTM, 3, 4, batch_first=True)
    x, lengths = torch.randn(2, 3, 3), torch.tensor([3, 2])
    outputs = []
    for layer, data in ((plain, x), (moved, x.cuda())):
        packed = pack_padded_sequence(data, lengths, batch_first=True)
        assert packed.batch_sizes.device.type == "cpu"
        out, seen = pad_packed_sequence(layer(packed)[0], batch_first=True)
        out.sum().backward()
        outputs.append((out.detach().cpu(), seen, layer.weight_hh_l0.grad.cpu()))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cells_have_second_derivatives(kind, machine):
    plain, moved = pair(kind, 3, 4)
    found = []
    for layer, device in ((plain, "cpu"), (moved, "cuda")):
        x = torch.linspace(-1, 1, 6, device=device).view(2, 3).requires_grad_()
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append((first.detach().cpu(), second.cpu()))
    torch.testing.assert_close(*found)


def test_weights_lie_in_one_block(machine):
    layer = nn.LSTM(3, 4, device="cuda")
    assert len({w.untyped_storage().data_ptr() for w in layer.parameters()}) == 1


def test_backward_of_evaluation_is_refused(machine):
    layer = nn.GRU(3, 4, device="cuda").eval()
    with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
        layer(torch.randn(5, 2, 3, device="cuda"))[0].sum().backward()
