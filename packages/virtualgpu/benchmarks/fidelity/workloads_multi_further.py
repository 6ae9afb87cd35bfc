"""Allocator workloads of further kinds on several devices, plain PyTorch: held against recordings of their own, made after the rules."""

import threading

import torch
import torch.nn as nn
import torch.nn.functional as F


def w_data_parallel_images(cp):
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    net = nn.DataParallel(net.cuda())
    opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    cp("ready")
    for step in range(2):
        x, y = torch.randn(64, 1, 28, 28).cuda(), torch.randint(0, 10, (64,)).cuda()
        loss = F.cross_entropy(net(x), y)
        cp(f"forward {step}")
        opt.zero_grad()
        loss.backward()
        cp(f"backward {step}")
        opt.step()
        cp(f"step {step}")
    net.eval()
    with torch.no_grad():
        net(torch.randn(30, 1, 28, 28).cuda())
    cp("evaluated")


def w_data_parallel_transformer(cp):
    layer = nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True)
    net = nn.Sequential(nn.Embedding(2000, 128), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 2000)).cuda()
    net = nn.DataParallel(net, device_ids=[0, 1, 2])
    opt = torch.optim.AdamW(net.parameters())
    ids = torch.randint(0, 2000, (24, 32), device="cuda")
    cp("ready")
    for step in range(2):
        loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
        cp(f"forward {step}")
        opt.zero_grad()
        loss.backward()
        cp(f"backward {step}")
        opt.step()
        cp(f"step {step}")


def w_data_parallel_autocast(cp):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(400, 1000), nn.ReLU(), nn.Linear(1000, 100))

        def forward(self, x):
            with torch.autocast("cuda", dtype=torch.float16):
                return self.layers(x)

    net = nn.DataParallel(Net().cuda())
    opt, scaler = torch.optim.Adam(net.parameters()), torch.amp.GradScaler("cuda")
    cp("ready")
    for step in range(2):
        x, y = torch.randn(128, 400, device="cuda"), torch.randint(0, 100, (128,), device="cuda")
        loss = F.cross_entropy(net(x).float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        cp(f"backward {step}")
        scaler.step(opt)
        scaler.update()
        cp(f"step {step}")


def w_data_parallel_uneven(cp):
    net = nn.DataParallel(nn.Sequential(nn.Linear(300, 700), nn.BatchNorm1d(700), nn.Sigmoid(), nn.Linear(700, 7)).cuda())
    cp("ready")
    for n in (50, 10, 3):
        net(torch.randn(n * 2, 300)).sum().backward()
        cp(f"batch of {n * 2}")
    net.module.zero_grad()
    cp("gradients dropped")


def w_three_stages(cp):
    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(1000, 600), nn.GELU()).to("cuda:0")
            self.b = nn.Sequential(nn.Linear(600, 600), nn.LayerNorm(600), nn.GELU(), nn.Dropout(0.1)).to("cuda:1")
            self.c = nn.Linear(600, 30).to("cuda:2")

        def forward(self, x):
            return self.c(self.b(self.a(x.to("cuda:0")).to("cuda:1")).to("cuda:2"))

    net = Stages()
    opt = torch.optim.Adam(net.parameters())
    cp("ready")
    for step in range(2):
        x, y = torch.randn(200, 1000), torch.randint(0, 30, (200,))
        loss = nn.CrossEntropyLoss()(net(x), y.to("cuda:2"))
        cp(f"forward {step}")
        opt.zero_grad()
        loss.backward()
        cp(f"backward {step}")
        opt.step()
        cp(f"step {step}")
    net.eval()
    with torch.no_grad():
        print(net(x).argmax(1).cpu().shape)
    cp("evaluated")


def w_split_conv(cp):
    first = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)).to("cuda:0")
    second = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(
        "cuda:1"
    )
    opt = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    cp("ready")
    for step in range(2):
        parts = iter(torch.randn(64, 3, 32, 32, device="cuda:0").split(16))
        ahead, results = first(next(parts)).to("cuda:1"), []
        for part in parts:
            results.append(second(ahead))
            ahead = first(part).to("cuda:1")
        results.append(second(ahead))
        out = torch.cat(results)
        cp(f"forward {step}")
        opt.zero_grad()
        F.cross_entropy(out, torch.randint(0, 10, (64,), device="cuda:1")).backward()
        cp(f"backward {step}")
        opt.step()
        cp(f"step {step}")


def w_by_hand(cp):
    gpus = range(torch.cuda.device_count())
    net = nn.Sequential(nn.Linear(500, 900), nn.ReLU(), nn.Linear(900, 20)).cuda()
    cp("ready")
    for step in range(2):
        replicas = nn.parallel.replicate(net, list(gpus))
        inputs = nn.parallel.scatter(torch.randn(100, 500).cuda(), list(gpus))
        cp(f"scattered {step}")
        outputs = nn.parallel.parallel_apply(replicas, inputs)
        result = nn.parallel.gather(outputs, 0)
        cp(f"gathered {step}")
        result.square().mean().backward()
        cp(f"backward {step}")
        del replicas, inputs, outputs, result
        cp(f"dropped {step}")


def w_averaged_gradients(cp):
    gpus = torch.cuda.device_count()
    nets = [nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 60)).to(f"cuda:{i}") for i in range(gpus)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in nets]
    cp("ready")
    for step in range(2):
        for i, net in enumerate(nets):
            optimizers[i].zero_grad()
            net(torch.randn(50, 600, device=f"cuda:{i}")).pow(2).mean().backward()
        cp(f"backward {step}")
        for parameters in zip(*[net.parameters() for net in nets]):
            mean = sum(p.grad.to("cuda:0") for p in parameters) / gpus
            for p in parameters:
                p.grad.copy_(mean)
        cp(f"averaged {step}")
        for opt in optimizers:
            opt.step()
        cp(f"step {step}")


def w_copies_of_state(cp):
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.LazyLinear(50)).cuda()
    net(torch.randn(2, 3, 20, 20, device="cuda"))
    cp("ready")
    other = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 18 * 18, 50)).to("cuda:1")
    other.load_state_dict(net.state_dict())
    cp("loaded")
    kept = {key: value.cpu() for key, value in other.state_dict().items()}
    other.to("cuda:2")
    cp("moved")
    other.load_state_dict({key: value.to("cuda:3") for key, value in kept.items()})
    cp("loaded again")
    other.half()
    cp("half")
    other.cpu()
    cp("on the host")


def w_worker_threads(cp):
    results = {}

    def work(i):
        with torch.cuda.device(i):
            net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 26 * 26, 10)).cuda()
            for _ in range(2):
                F.cross_entropy(net(torch.randn(32, 1, 28, 28, device="cuda")), torch.zeros(32, dtype=torch.long, device="cuda")).backward()
            results[i] = net

    for i in range(torch.cuda.device_count()):
        thread = threading.Thread(target=work, args=(i,))
        thread.start()
        thread.join()
        cp(f"worker {i}")
    results.clear()
    cp("dropped")
