"""More allocator workloads with plain PyTorch, of other kinds than workloads_shared: held against recordings of their own."""

import torch
import torch.nn as nn
import torch.nn.functional as F

MiB = 1 << 20


def buf(n, device="cuda"):
    return torch.empty(n, dtype=torch.uint8, device=device)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    def __init__(self, vocabulary=5000, width=192, layers=3, heads=6, length=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_training(cp, dtype=None):
    net = TinyGPT().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    ids = torch.randint(0, 5000, (8, 64), device="cuda")
    cp("ready")
    for step in range(3):
        with torch.autocast("cuda", dtype=dtype or torch.float16, enabled=dtype is not None):
            logits = net(ids)
            loss = F.cross_entropy(logits.view(-1, 5000), ids.view(-1))
        cp(f"forward {step}")
        opt.zero_grad()
        loss.backward()
        cp(f"backward {step}")
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        cp(f"step {step}")
        del logits, loss
    cp("dropped")


def w_gpt(cp):
    gpt_training(cp)


def w_gpt_bf16(cp):
    gpt_training(cp, torch.bfloat16)


def w_gpt_generate(cp):
    net = TinyGPT().cuda().eval()
    ids = torch.randint(0, 5000, (4, 8), device="cuda")
    cp("ready")
    with torch.no_grad():
        for _ in range(5):
            ids = torch.cat([ids, net(ids)[:, -1].softmax(-1).multinomial(1)], 1)
    cp("generated")


def w_lstm_language_model(cp):
    emb, lstm, head = nn.Embedding(2000, 128).cuda(), nn.LSTM(128, 256, batch_first=True).cuda(), nn.Linear(256, 2000).cuda()
    params = [*emb.parameters(), *lstm.parameters(), *head.parameters()]
    opt = torch.optim.Adam(params)
    ids = torch.randint(0, 2000, (16, 40), device="cuda")
    cp("ready")
    for step in range(2):
        loss = F.cross_entropy(head(lstm(emb(ids))[0]).flatten(0, 1), ids.flatten())
        cp(f"forward {step}")
        opt.zero_grad()
        loss.backward()
        cp(f"backward {step}")
        opt.step()
        cp(f"step {step}")


def w_autoencoder_dropout(cp):
    net = nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 784)
    ).cuda()
    opt = torch.optim.RMSprop(net.parameters())
    cp("ready")
    for step in range(2):
        x = torch.rand(200, 784).cuda()
        loss = F.binary_cross_entropy_with_logits(net(x), x)
        cp(f"forward {step}")
        opt.zero_grad()
        loss.backward()
        opt.step()
        cp(f"step {step}")
    net.eval()
    with torch.no_grad():
        net(x)
    cp("evaluated")


def w_gan(cp):
    g = nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 784), nn.Tanh()).cuda()
    d = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).cuda()
    og, od = torch.optim.Adam(g.parameters(), betas=(0.5, 0.999)), torch.optim.Adam(d.parameters(), betas=(0.5, 0.999))
    one, zero = torch.ones(128, 1, device="cuda"), torch.zeros(128, 1, device="cuda")
    cp("ready")
    for step in range(2):
        fake = g(torch.randn(128, 64, device="cuda"))
        real = torch.randn(128, 784, device="cuda")
        ld = F.binary_cross_entropy_with_logits(d(real), one) + F.binary_cross_entropy_with_logits(d(fake.detach()), zero)
        od.zero_grad()
        ld.backward()
        od.step()
        cp(f"discriminator {step}")
        lg = F.binary_cross_entropy_with_logits(d(fake), one)
        og.zero_grad()
        lg.backward()
        og.step()
        cp(f"generator {step}")


def w_resnet_blocks(cp):
    class Residual(nn.Module):
        def __init__(self, a, b, stride):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(a, b, 3, stride, 1, bias=False),
                nn.BatchNorm2d(b),
                nn.ReLU(True),
                nn.Conv2d(b, b, 3, 1, 1, bias=False),
                nn.BatchNorm2d(b),
            )
            self.short = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

        def forward(self, x):
            return F.relu(self.body(x) + self.short(x))

    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1),
        nn.ReLU(),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).cuda()
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    x, t = torch.randn(32, 3, 32, 32, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    cp("ready")
    for step in range(2):
        loss = F.cross_entropy(net(x), t)
        cp(f"forward {step}")
        opt.zero_grad()
        loss.backward()
        cp(f"backward {step}")
        opt.step()
        cp(f"step {step}")
    net.eval()
    with torch.no_grad():
        net(x)
    cp("evaluated")


def w_record_stream(cp):
    s = torch.cuda.Stream()
    a = buf(20 * MiB)
    with torch.cuda.stream(s):
        b = a + 1
        a.record_stream(s)
    cp("used on side")
    del a
    cp("freed")
    c = buf(20 * MiB)
    cp("again")
    with torch.cuda.stream(s):
        y = torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
    cp("product on side")
    z = torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
    cp("product on main")
    del b, c, y, z
    torch.cuda.empty_cache()
    cp("emptied")


def w_threads(cp):
    import threading

    def work(n):
        x = torch.randn(n, n, device="cuda")
        (x @ x).sum().item()

    for n in (256, 300):
        threads = [threading.Thread(target=work, args=(n,)) for _ in range(2)]
        for t in threads:
            t.start()
            t.join()
        cp(f"threads of {n}")
    work(200)
    cp("main")


def w_mixed_sizes(cp):
    keep = {}
    for i in range(200):
        n = (i * 7919) % 97 + 1
        keep[i] = buf(n * (1000 if i % 3 else 40000))
        if i >= 20:
            keep.pop(i - 20 + (i % 5) * 2 if i - 20 + (i % 5) * 2 in keep else next(iter(keep)))
        if i % 25 == 24:
            cp(f"after {i + 1}")
    keep.clear()
    cp("cleared")
    torch.cuda.empty_cache()
    cp("emptied")


def w_leaky_loop(cp):
    net = nn.Linear(512, 512).cuda()
    outputs, hooks = [], []
    net.register_forward_hook(lambda m, i, o: hooks.append(o.detach().mean(0)))
    for step in range(4):
        outputs.append(net(torch.randn(256, 512, device="cuda")).tanh())
        cp(f"step {step}")
    sum(o.sum() for o in outputs).backward()
    cp("backward")
    outputs.clear()
    hooks.clear()
    cp("cleared")


def w_double_backward(cp):
    net = nn.Sequential(nn.Linear(100, 200), nn.Tanh(), nn.Linear(200, 1)).cuda()
    x = torch.randn(128, 100, device="cuda", requires_grad=True)
    cp("ready")
    (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    cp("first")
    ((g.norm(dim=1) - 1) ** 2).mean().backward()
    cp("penalty")


def w_double_precision_statistics(cp):
    x = torch.randn(3000, 200, device="cuda", dtype=torch.float64)
    cp("x")
    mean = x.mean(0)
    centred = x - mean
    cp("centred")
    cov = centred.t() @ centred / 2999
    cp("covariance")
    values = torch.linalg.eigvalsh(cov)
    cp("eigenvalues")
    order = values.argsort(descending=True)
    top = x[:, order[:10]]
    cp("top")
    del mean, centred, cov, values, order, top
    cp("dropped")


def w_half_training(cp):
    net = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 512)).cuda().bfloat16()
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
    cp("ready")
    for step in range(2):
        loss = F.mse_loss(net(x), x)
        cp(f"forward {step}")
        opt.zero_grad()
        loss.backward()
        cp(f"backward {step}")
        opt.step()
        cp(f"step {step}")


def w_data_pipeline(cp):
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(64, 3, 32, 32), torch.arange(64)), batch_size=16, pin_memory=True
    )
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 100)).cuda()
    cp("ready")
    for x, y in data:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        F.cross_entropy(net(x), y).backward()
        cp("batch")
