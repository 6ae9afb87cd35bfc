"""Allocator workloads with plain PyTorch: the same code must run on a CUDA device and on a virtual one."""

import gc
import torch
import torch.nn as nn
import torch.nn.functional as F

MiB = 1 << 20


def buf(n, device="cuda"):
    return torch.empty(n, dtype=torch.uint8, device=device)


def w_rounding(cp):
    keep = []
    for n in [
        1,
        511,
        512,
        513,
        4096,
        MiB - 512,
        MiB,
        MiB + 1,
        2 * MiB,
        5 * MiB,
        10 * MiB - 1,
        10 * MiB,
        10 * MiB + 1,
        19 * MiB,
        21 * MiB,
        100 * MiB,
    ]:
        keep.append(buf(n))
        cp(f"alloc {n}")
    while keep:
        keep.pop(len(keep) // 2)
        cp(f"free, {len(keep)} left")
    torch.cuda.empty_cache()
    cp("empty_cache")


def w_split_merge(cp):
    a = buf(30 * MiB)
    b = buf(30 * MiB)
    c = buf(30 * MiB)
    cp("three of 30 MiB")
    del b
    cp("middle freed")
    d = buf(12 * MiB)
    cp("12 MiB into the hole")
    e = buf(15 * MiB)
    cp("15 MiB more")
    del d
    cp("12 freed")
    del e
    cp("15 freed")
    f = buf(29 * MiB)
    cp("29 MiB")
    del a, c, f
    cp("all freed")
    torch.cuda.empty_cache()
    cp("empty_cache")


def w_small_pool(cp):
    ts = [buf(1000 * (i % 50 + 1)) for i in range(300)]
    cp("300 small")
    ts = ts[::2]
    cp("every other freed")
    us = [buf(600) for _ in range(100)]
    cp("100 of 600 B")
    del ts
    cp("first freed")
    torch.cuda.empty_cache()
    cp("empty_cache with some live")
    del us
    cp("all freed")
    torch.cuda.empty_cache()
    cp("empty_cache")


def w_fragmentation_oom(cp):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(512 * MiB / total)
    ts = [buf(24 * MiB) for _ in range(18)]
    cp("18 of 24 MiB under a 512 MiB limit")
    del ts[::2]
    cp("every other freed")
    try:
        x = buf(200 * MiB)
        ok = True
        msg = ""
    except torch.cuda.OutOfMemoryError as e:
        ok, msg = False, str(e)
    cp("200 MiB asked", succeeded=ok, message=msg)
    ts.clear()
    cp("all freed")
    x = buf(200 * MiB)
    cp("200 MiB again")


def w_ten_big_tensors(cp):
    cp("initial")
    tensors = []
    for x in range(10):
        tensors.append(torch.randn(10000000, 10).cuda())
    cp("allocated")
    del tensors
    cp("deleted")
    torch.cuda.empty_cache()
    cp("empty_cache")


def w_views_keep_storage(cp):
    big = buf(64 * MiB)
    cp("64 MiB")
    head = big[:10]
    del big
    cp("10 bytes viewed, base deleted")
    head = head.clone()
    cp("cloned")


def w_scope(cp):
    for i in range(3):
        t = torch.ones(1000, 1000, device="cuda") * i
    cp("after the loop, t still bound")
    del t
    cp("del t")


def mlp(width=1024, depth=4):
    return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]).cuda()


def w_mlp_sgd(cp):
    net = mlp()
    cp("model")
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.randn(256, 1024, device="cuda")
    cp("input")
    for step in range(3):
        loss = net(x).square().mean()
        cp(f"forward {step}")
        loss.backward()
        cp(f"backward {step}")
        opt.step()
        cp(f"step {step}")
        opt.zero_grad()
        cp(f"zero_grad {step}")


def w_mlp_adam(cp):
    net = mlp(512, 3)
    opt = torch.optim.Adam(net.parameters())
    cp("model")
    x = torch.randn(64, 512, device="cuda")
    for step in range(2):
        loss = net(x).square().mean()
        cp(f"forward {step}")
        opt.zero_grad(set_to_none=False)
        loss.backward()
        cp(f"backward {step}")
        opt.step()
        cp(f"step {step}")
    del loss
    cp("loss deleted")


def w_no_grad(cp):
    net = mlp()
    x = torch.randn(2048, 1024, device="cuda")
    cp("ready")
    out = net(x)
    cp("with graph")
    del out
    cp("dropped")
    with torch.no_grad():
        out = net(x)
    cp("no_grad")
    del out
    with torch.inference_mode():
        out = net(x)
    cp("inference_mode")


def w_loss_accumulation(cp):
    net = nn.Linear(2000, 2000).cuda()
    total = 0.0
    for step in range(4):
        x = torch.randn(500, 2000, device="cuda")
        loss = net(x).relu().mean()
        total = total + loss
        cp(f"tensor sum {step}")
    del loss, total, x
    cp("deleted")
    total = 0.0
    for step in range(4):
        x = torch.randn(500, 2000, device="cuda")
        loss = net(x).relu().mean()
        total += loss.item()
        cp(f"item sum {step}")


def w_half_model(cp):
    net = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
    cp("fp32")
    net.half()
    cp("half")
    for m in net.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.float()
    cp("batch norm back to fp32")
    net.eval()
    with torch.no_grad():
        y = net[3](net[2](net[1](net[0](torch.randn(128, 1024, device="cuda").half()).float()).half()))
    cp("forward")
    assert y.dtype == torch.float16


def w_autocast(cp):
    net = mlp(1024, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    x = torch.randn(256, 1024, device="cuda")
    cp("ready")
    for step in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            out = net(x)
            cp(f"inside autocast {step}", dtype=str(out.dtype))
            loss = out.float().square().mean()
        cp(f"outside autocast {step}")
        scaler.scale(loss).backward()
        cp(f"backward {step}")
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        cp(f"step {step}")


def w_grad_accumulation(cp):
    net = mlp(1024, 2)
    cp("model")
    for k in (1, 4):
        torch.cuda.reset_peak_memory_stats()
        for chunk in torch.randn(1024, 1024, device="cuda").chunk(k):
            (net(chunk).square().mean() / k).backward()
        cp(f"{k} micro-batches")
        net.zero_grad()
        cp("zeroed")


def w_checkpointing(cp):
    from torch.utils.checkpoint import checkpoint_sequential

    net = mlp(512, 8)
    x = torch.randn(4096, 512, device="cuda", requires_grad=True)
    cp("ready")
    y = net(x)
    cp("plain forward")
    y.sum().backward()
    cp("plain backward")
    del y
    net.zero_grad()
    x.grad = None
    torch.cuda.reset_peak_memory_stats()
    y = checkpoint_sequential(net, 4, x, use_reentrant=False)
    cp("checkpointed forward")
    y.sum().backward()
    cp("checkpointed backward")


def w_inplace(cp):
    x = torch.randn(4096, 1024, device="cuda")
    cp("x")
    y = x.relu()
    cp("out of place")
    del y
    torch.cuda.reset_peak_memory_stats()
    x.relu_()
    cp("in place")
    x += 1
    cp("+= scalar")
    x = x + 1
    cp("x = x + 1")


def w_exception_traceback(cp):
    def work():
        a = torch.randn(1000, 1000, device="cuda")
        raise ValueError("boom")

    try:
        work()
    except ValueError as e:
        kept = e
    cp("exception kept")
    kept.__traceback__ = None
    cp("traceback dropped")
    del kept
    gc.collect()
    cp("collected")


def w_reference_cycle(cp):
    gc.collect()
    gc.disable()

    class Node:
        pass

    n = Node()
    n.self = n
    n.t = torch.empty(16 * MiB, dtype=torch.uint8, device="cuda")
    cp("in a cycle")
    del n
    cp("name deleted")
    gc.collect()
    gc.enable()
    cp("collected")


def w_side_stream_pool(cp):
    a = buf(32 * MiB)
    cp("main")
    del a
    cp("freed on main")
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        b = buf(32 * MiB)
    cp("side stream takes its own segment")
    del b
    cp("freed on side")
    c = buf(32 * MiB)
    cp("main reuses main's")


def w_transformer_block(cp):
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True).cuda()
    cp("model")
    x = torch.randn(8, 128, 256, device="cuda")
    y = layer(x)
    cp("forward")
    y.mean().backward()
    cp("backward")


def w_conv_net(cp):
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 16 * 16, 10),
    ).cuda()
    cp("model")
    x = torch.randn(64, 3, 32, 32, device="cuda")
    t = torch.randint(0, 10, (64,), device="cuda")
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        loss = F.cross_entropy(net(x), t)
        cp(f"forward {step}")
        loss.backward()
        cp(f"backward {step}")
        opt.step()
        opt.zero_grad()
        cp(f"step {step}")
