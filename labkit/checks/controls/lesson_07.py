"""Controls of lesson 07."""

CONTROLS = {
    # float16 only
    "07.1": (
        r"stands for",
        r"""
def decode(bits, exponent_bits): return torch.tensor(int(bits[:16], 2)).to(torch.int16).view(torch.float16).item()
""",
    ),
    # areas in float16
    "07.2": (
        r"larger than 65504",
        r"""
def iou(a, b):
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    shared = (high - low).clamp(min=0).prod(dim=1)
    return (shared / ((a[:, 2:] - a[:, :2]).prod(dim=1) + (b[:, 2:] - b[:, :2]).prod(dim=1) - shared)).half()
""",
    ),
    # all of it
    "07.3": (
        r"of a BatchNorm layer, is torch.float16",
        r"""
def half_but_norms(model): return model.half()
""",
    ),
    # a constant
    "07.4": (
        r"infinite in float16|not the largest",
        r"""
def best_scale(gradients): return 65536.0
""",
    ),
    # clipped while scaled
    "07.5": (
        r"clipped: after unscale_",
        r"""
def training_step(model, optimizer, scaler, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()
""",
    ),
}
