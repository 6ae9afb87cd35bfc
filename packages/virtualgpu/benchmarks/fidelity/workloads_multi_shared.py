"""Allocator workloads on several devices, plain PyTorch."""

import torch, torch.nn as nn, torch.nn.functional as F

MiB = 1 << 20


def mlp(w=1024, d=4):
    return nn.Sequential(*[m for _ in range(d) for m in (nn.Linear(w, w), nn.ReLU())])


def w_data_parallel_steps(cp):
    from torch.nn.parallel import replicate, scatter, parallel_apply, gather

    ids = list(range(torch.cuda.device_count()))
    net = mlp().cuda(0)
    x = torch.randn(512, 1024, device="cuda:0")
    cp("module and input on 0")
    replicas = replicate(net, ids)
    cp("replicate")
    inputs = scatter(x, ids)
    cp("scatter", shapes=[list(i.shape) for i in inputs])
    outputs = parallel_apply(replicas, inputs)
    cp("parallel_apply")
    y = gather(outputs, 0)
    cp("gather", shape=list(y.shape))
    y.square().mean().backward()
    cp("backward")
    del replicas, inputs, outputs, y
    cp("dropped")


def w_data_parallel_train(cp):
    net = nn.DataParallel(mlp(512, 3).cuda())
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(1024, 512, device="cuda:0")
    t = torch.randint(0, 512, (1024,), device="cuda:0")
    cp("ready")
    for i in range(2):
        out = net(x)
        cp(f"forward {i}")
        loss = F.cross_entropy(out, t)
        cp(f"loss {i}")
        loss.backward()
        cp(f"backward {i}")
        opt.step()
        opt.zero_grad()
        cp(f"step {i}")


def w_model_parallel(cp):
    a, b = mlp(1024, 2).cuda(0), mlp(1024, 2).cuda(1)
    cp("halves")
    x = torch.randn(256, 1024, device="cuda:0")
    h = a(x)
    cp("first half")
    y = b(h.to("cuda:1"))
    cp("second half")
    y.square().mean().backward()
    cp("backward")
    del h, y
    cp("dropped")


def w_move_between(cp):
    x = torch.randn(1 << 20, device="cuda:0")
    cp("on 0")
    y = x.to("cuda:1")
    cp("copied to 1")
    del x
    cp("0 dropped")
    z = y.cpu()
    cp("to cpu")
    y = y.to("cuda:1")
    cp("no-op .to")
