"""More allocator workloads on several devices, plain PyTorch: held against recordings of their own."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def w_data_parallel_conv(cp):
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    ).cuda()
    net = nn.DataParallel(net)
    opt = torch.optim.Adam(net.parameters())
    x, t = torch.randn(64, 3, 32, 32, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    cp("ready")
    for i in range(2):
        loss = F.cross_entropy(net(x), t)
        cp(f"forward {i}")
        opt.zero_grad()
        loss.backward()
        cp(f"backward {i}")
        opt.step()
        cp(f"step {i}")


def w_data_parallel_cpu_batch(cp):
    net = nn.DataParallel(nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 50)).cuda(), device_ids=[0, 1])
    x = torch.randn(90, 1000)
    cp("ready")
    for i in range(3):
        net(x).sum().backward()
        cp(f"step {i}")
    with torch.no_grad():
        net(x)
    cp("evaluated")


def w_data_parallel_loss_inside(cp):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2000))

        def forward(self, x, t):
            return F.cross_entropy(self.net(x), t)

    net = nn.DataParallel(WithLoss().cuda())
    x, t = torch.randn(400, 512, device="cuda"), torch.randint(0, 2000, (400,), device="cuda")
    cp("ready")
    for i in range(2):
        net(x, t).mean().backward()
        cp(f"step {i}")


def w_pipeline(cp):
    stages = [nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda(i) for i in range(torch.cuda.device_count())]
    opt = torch.optim.SGD([p for s in stages for p in s.parameters()], 0.1)
    x = torch.randn(256, 512, device="cuda:0")
    cp("ready")
    for step in range(2):
        outputs = []
        for chunk in x.split(64):
            for i, stage in enumerate(stages):
                chunk = stage(chunk.to(f"cuda:{i}"))
            outputs.append(chunk)
        loss = torch.cat(outputs).square().mean()
        cp(f"forward {step}")
        opt.zero_grad()
        loss.backward()
        cp(f"backward {step}")
        opt.step()
        cp(f"step {step}")


def w_ensemble_threads(cp):
    import threading

    nets = [nn.Linear(800, 800).cuda(i) for i in range(torch.cuda.device_count())]
    cp("ready")

    def train(i):
        for _ in range(2):
            nets[i](torch.randn(100, 800, device=f"cuda:{i}")).square().mean().backward()

    for i in range(len(nets)):
        thread = threading.Thread(target=train, args=(i,))
        thread.start()
        thread.join()
    cp("trained")


def w_copies(cp):
    xs = [torch.randn(1 << 18, device="cuda:0") for _ in range(3)]
    ys = [x.to("cuda:1", non_blocking=True) for x in xs]
    cp("copied")
    xs[0].copy_(ys[1])
    cp("back")
    z = torch.zeros(1 << 18, dtype=torch.float16, device="cuda:1")
    z.copy_(xs[0])
    cp("converted")
    w = xs[0].view(512, 512).t().to("cuda:1")
    cp("transposed")
    h = xs[1].half().to("cuda:1")
    cp("half")
    k = xs[2].to("cuda:1", torch.float64)
    cp("double")
    del xs, ys, z, w, h, k
    cp("dropped")
