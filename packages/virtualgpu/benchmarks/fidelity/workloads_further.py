"""Allocator workloads of further kinds with plain PyTorch: held against recordings of their own, made after the rules."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint_sequential


def train(cp, loss_of, optimizers, steps=2):
    """Steps of training with a checkpoint after each part."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    cp("ready")
    for step in range(steps):
        loss = loss_of()
        cp(f"forward {step}")
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        cp(f"backward {step}")
        for optimizer in optimizers:
            optimizer.step()
        cp(f"step {step}")


def w_vae(cp):
    encoder = nn.Sequential(nn.Linear(784, 400), nn.ReLU()).cuda()
    mean, spread = nn.Linear(400, 20).cuda(), nn.Linear(400, 20).cuda()
    decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784), nn.Sigmoid()).cuda()
    parameters = [p for m in (encoder, mean, spread, decoder) for p in m.parameters()]

    def loss():
        x = torch.rand(128, 784).cuda()
        h = encoder(x)
        mu, log_variance = mean(h), spread(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * log_variance)
        kl = -0.5 * torch.sum(1 + log_variance - mu.pow(2) - log_variance.exp())
        return F.binary_cross_entropy(decoder(z), x, reduction="sum") + kl

    train(cp, loss, torch.optim.Adam(parameters, lr=1e-3))


def w_dcgan(cp):
    g = nn.Sequential(
        nn.ConvTranspose2d(64, 128, 4, 1, 0, bias=False),
        nn.BatchNorm2d(128),
        nn.ReLU(True),
        nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(True),
        nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    ).cuda()
    d = nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(64, 128, 4, 2, 1, bias=False),
        nn.BatchNorm2d(128),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(128, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
    ).cuda()
    og, od = torch.optim.Adam(g.parameters(), 2e-4), torch.optim.Adam(d.parameters(), 2e-4)
    criterion = nn.BCELoss()
    cp("ready")
    for step in range(2):
        d.zero_grad()
        real = torch.randn(64, 3, 16, 16, device="cuda")
        label = torch.full((64,), 1.0, device="cuda")
        criterion(d(real).view(-1), label).backward()
        cp(f"real {step}")
        fake = g(torch.randn(64, 64, 1, 1, device="cuda"))
        label.fill_(0.0)
        criterion(d(fake.detach()).view(-1), label).backward()
        od.step()
        cp(f"discriminator {step}")
        g.zero_grad()
        label.fill_(1.0)
        criterion(d(fake).view(-1), label).backward()
        og.step()
        cp(f"generator {step}")


def w_vit(cp):
    class ViT(nn.Module):
        def __init__(self, width=128, patch=8, size=64, layers=2, heads=4):
            super().__init__()
            self.patch = nn.Conv2d(3, width, patch, patch)
            self.cls = nn.Parameter(torch.zeros(1, 1, width))
            self.pos = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
            layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 100))

        def forward(self, x):
            x = self.patch(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
            return self.head(self.encoder(x)[:, 0])

    net = ViT().cuda()
    x, y = torch.randn(32, 3, 64, 64, device="cuda"), torch.randint(0, 100, (32,), device="cuda")
    train(cp, lambda: F.cross_entropy(net(x), y, label_smoothing=0.1), torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.05))
    net.eval()
    with torch.no_grad():
        (net(x).argmax(1) == y).float().mean().item()
    cp("evaluated")


def w_unet(cp):
    def double(a, b):
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()
        )

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = double(3, 16), double(16, 32), double(32, 64)
            self.up1, self.d = nn.ConvTranspose2d(64, 32, 2, 2), double(64, 32)
            self.up2, self.e = nn.ConvTranspose2d(32, 16, 2, 2), double(32, 16)
            self.out = nn.Conv2d(16, 4, 1)

        def forward(self, x):
            a = self.a(x)
            b = self.b(F.max_pool2d(a, 2))
            c = self.c(F.max_pool2d(b, 2))
            d = self.d(torch.cat([self.up1(c), b], 1))
            return self.out(self.e(torch.cat([self.up2(d), a], 1)))

    net = UNet().cuda()
    x, y = torch.randn(4, 3, 64, 64, device="cuda"), torch.randint(0, 4, (4, 64, 64), device="cuda")
    train(cp, lambda: F.cross_entropy(net(x), y), torch.optim.Adam(net.parameters()))


def w_seq2seq(cp):
    class Attend(nn.Module):
        def __init__(self, words=1000, width=128):
            super().__init__()
            self.source, self.target = nn.Embedding(words, width, padding_idx=0), nn.Embedding(words, width, padding_idx=0)
            self.encoder = nn.GRU(width, width, 2, dropout=0.2, batch_first=True)
            self.cell, self.query = nn.GRUCell(2 * width, width), nn.Linear(width, width, bias=False)
            self.out = nn.Linear(width, words)

        def forward(self, source, target):
            memory, state = self.encoder(self.source(source))
            h, results = state[-1], []
            for token in target.unbind(1):
                weights = torch.bmm(memory, self.query(h).unsqueeze(2)).squeeze(2).softmax(1)
                context = (weights.unsqueeze(2) * memory).sum(1)
                h = self.cell(torch.cat([self.target(token), context], 1), h)
                results.append(self.out(h))
            return torch.stack(results, 1)

    net = Attend().cuda()
    source, target = torch.randint(1, 1000, (32, 15), device="cuda"), torch.randint(1, 1000, (32, 8), device="cuda")

    def loss():
        return F.cross_entropy(net(source, target[:, :-1]).reshape(-1, 1000), target[:, 1:].reshape(-1), ignore_index=0)

    train(cp, loss, torch.optim.Adam(net.parameters()))


def w_graph_network(cp):
    nodes, edges = 2000, 10000
    source, target = torch.randint(0, nodes, (edges,), device="cuda"), torch.randint(0, nodes, (edges,), device="cuda")
    degree = torch.zeros(nodes, device="cuda").index_add_(0, target, torch.ones(edges, device="cuda")).clamp(min=1)
    first, second = nn.Linear(64, 128).cuda(), nn.Linear(128, 10).cuda()
    x, y = torch.randn(nodes, 64, device="cuda"), torch.randint(0, 10, (nodes,), device="cuda")
    chosen = torch.arange(0, nodes, 4, device="cuda")

    def spread(h):
        return torch.zeros_like(h).index_add(0, target, h[source]) / degree.unsqueeze(1)

    def gather_max(h):
        index = target.unsqueeze(1).expand(-1, h.shape[1])
        return torch.zeros_like(h).scatter_reduce(0, index, h.index_select(0, source), "amax")

    def loss():
        h = F.relu(spread(first(x)))
        h = F.dropout(gather_max(h), 0.5)
        return F.nll_loss(spread(second(h)).log_softmax(1)[chosen], y[chosen])

    train(cp, loss, torch.optim.Adam([*first.parameters(), *second.parameters()], 0.01, weight_decay=5e-4))


def w_policy_gradient(cp):
    policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)).cuda()
    value = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    opt = torch.optim.Adam([*policy.parameters(), *value.parameters()], 3e-3)
    cp("ready")
    for episode in range(2):
        log_probabilities, values, rewards, entropies = [], [], [], []
        state = torch.randn(16, 8, device="cuda")
        for _ in range(20):
            chances = torch.distributions.Categorical(logits=policy(state))
            action = chances.sample()
            log_probabilities.append(chances.log_prob(action))
            entropies.append(chances.entropy())
            values.append(value(state).squeeze(1))
            rewards.append((action == 2).float() - 0.1)
            state = state * 0.9 + torch.randn_like(state) * 0.1
        cp(f"played {episode}")
        total, returns = torch.zeros(16, device="cuda"), []
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.insert(0, total)
        returns = torch.stack(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        advantage = returns - torch.stack(values).detach()
        loss = -(torch.stack(log_probabilities) * advantage).mean() + F.smooth_l1_loss(torch.stack(values), returns)
        loss = loss - 0.01 * torch.stack(entropies).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        opt.step()
        cp(f"learned {episode}")


def w_contrastive(cp):
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128)).cuda()
    x = torch.randn(200, 256, device="cuda")

    def loss():
        a = F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=1)
        b = F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=1)
        z = torch.cat([a, b])
        scores = (z @ z.t() / 0.5).masked_fill(torch.eye(400, dtype=torch.bool, device="cuda"), float("-inf"))
        positive = (a * b).sum(1).repeat(2) / 0.5
        spread = torch.logsumexp(-2 * torch.cdist(a, b).pow(2), dim=(0, 1))
        return (torch.logsumexp(scores, 1) - positive).mean() + 0.1 * spread

    train(cp, loss, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True))


def w_metric_learning(cp):
    net = nn.Sequential(nn.Linear(100, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 64)).cuda()
    anchor, positive, negative = (torch.randn(150, 100, device="cuda") for _ in range(3))
    triplet = nn.TripletMarginLoss(margin=1.0)

    def loss():
        a, p, n = net(anchor), net(positive), net(negative)
        distances = torch.cdist(a, torch.cat([p, n]))
        hardest = distances.topk(5, largest=False).values.mean()
        return triplet(a, p, n) + 0.1 * hardest + F.cosine_embedding_loss(a, p, torch.ones(150, device="cuda"))

    train(cp, loss, torch.optim.Adagrad(net.parameters(), 0.01))


def w_cached_generation(cp):
    width, heads, layers, words = 256, 8, 2, 4000
    emb = nn.Embedding(words, width).cuda()
    qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers)).cuda()
    out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers)).cuda()
    norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers)).cuda()
    head = nn.Linear(width, words).cuda()
    caches = [None] * layers

    @torch.no_grad()
    def advance(ids):
        x = emb(ids)
        for i in range(layers):
            q, k, v = qkv[i](norms[i](x)).view(*ids.shape, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            if caches[i] is not None:
                k, v = torch.cat([caches[i][0], k], 2), torch.cat([caches[i][1], v], 2)
            caches[i] = (k, v)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=ids.shape[1] > 1)
            x = x + out[i](y.transpose(1, 2).reshape(*ids.shape, width))
        return head(x[:, -1])

    ids = torch.randint(0, words, (4, 32), device="cuda")
    cp("ready")
    logits = advance(ids)
    cp("prompt")
    for step in range(6):
        limit = (logits / 0.8).topk(50).values[:, -1:]
        chances = logits.masked_fill(logits < limit, float("-inf")).softmax(-1)
        token = chances.multinomial(1)
        logits = advance(token)
        ids = torch.cat([ids, token], 1)
        if step % 3 == 2:
            cp(f"token {step}")
    caches.clear()
    cp("cache dropped")


def w_mixture_of_experts(cp):
    width, experts = 128, 4
    router = nn.Linear(width, experts).cuda()
    nets = nn.ModuleList(nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width)) for _ in range(experts)).cuda()
    x = torch.randn(512, width, device="cuda")

    def loss():
        chances = router(x).softmax(1)
        weights, choice = chances.topk(2, 1)
        weights = weights / weights.sum(1, keepdim=True)
        y = torch.zeros_like(x)
        for i, net in enumerate(nets):
            rows = torch.arange(i, 512, experts, device="cuda")  # as many for each, so that shapes do not depend on values
            share = torch.where(choice[rows] == i, weights[rows], torch.zeros_like(weights[rows])).sum(1, keepdim=True)
            y.index_add_(0, rows, (share + 0.1) * net(x[rows]))
        balance = experts * (chances.mean(0) * F.one_hot(choice[:, 0], experts).float().mean(0)).sum()
        return F.mse_loss(y, x) + 0.01 * balance

    train(cp, loss, torch.optim.AdamW([*router.parameters(), *nets.parameters()], 1e-3))


def w_distillation(cp):
    teacher = nn.Sequential(nn.Linear(300, 1200), nn.ReLU(), nn.Dropout(0.5), nn.Linear(1200, 50)).cuda().eval()
    student = nn.Sequential(nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 50)).cuda()
    x, y = torch.randn(256, 300, device="cuda"), torch.randint(0, 50, (256,), device="cuda")

    def loss():
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 4, 1)
        logits = student(x)
        return F.kl_div(F.log_softmax(logits / 4, 1), soft, reduction="batchmean") * 16 + F.cross_entropy(logits, y)

    train(cp, loss, torch.optim.RMSprop(student.parameters(), 1e-3, momentum=0.9))


def w_embedding_bag(cp):
    bag = nn.EmbeddingBag(20000, 64, mode="mean").cuda()
    head = nn.Linear(64, 4).cuda()
    text = torch.randint(0, 20000, (1600,), device="cuda")
    offsets = torch.arange(0, 1600, 25, device="cuda")
    y = torch.randint(0, 4, (64,), device="cuda")
    train(cp, lambda: F.cross_entropy(head(bag(text, offsets)), y), torch.optim.SGD([*bag.parameters(), *head.parameters()], 5.0))


def w_sparse_embedding(cp):
    table, head = nn.Embedding(50000, 32, sparse=True).cuda(), nn.Linear(32, 1).cuda()
    ids, y = torch.arange(0, 4000, 2, device="cuda").view(400, 5), torch.rand(400, 1, device="cuda")
    optimizers = [torch.optim.SparseAdam(table.parameters(), 1e-3), torch.optim.Adam(head.parameters(), 1e-3)]
    train(cp, lambda: F.binary_cross_entropy_with_logits(head(table(ids).mean(1)), y), optimizers)


def w_reparametrized(cp):
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    net = nn.Sequential(
        spectral_norm(nn.Linear(200, 300)), nn.ReLU(), weight_norm(nn.Linear(300, 100)), nn.Tanh(), nn.Linear(100, 1)
    ).cuda()
    x = torch.randn(128, 200, device="cuda")
    train(cp, lambda: F.softplus(-net(x)).mean(), torch.optim.NAdam(net.parameters(), 1e-3))


def w_lbfgs(cp):
    net = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1)).cuda()
    x = torch.linspace(-1, 1, 3000, device="cuda").view(300, 10)
    y = x.sum(1, keepdim=True).sin()
    opt = torch.optim.LBFGS(net.parameters(), max_iter=4, history_size=3)

    def closure():
        opt.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    cp("ready")
    for step in range(2):
        opt.step(closure)
        cp(f"step {step}")


def w_optimizers(cp):
    makes = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
        "sgd loop": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, foreach=False),
        "adam fused": lambda p: torch.optim.Adam(p, fused=True),
        "adamw amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, weight_decay=0.1),
        "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
        "adadelta": lambda p: torch.optim.Adadelta(p),
        "adamax": lambda p: torch.optim.Adamax(p),
        "radam": lambda p: torch.optim.RAdam(p),
    }
    for name, make in makes.items():
        net = nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 30)).cuda()
        opt = make(net.parameters())
        x = torch.randn(64, 300, device="cuda")
        for _ in range(2):
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
        cp(name)


def w_moving_average(cp):
    net = nn.Sequential(nn.Linear(400, 800), nn.SiLU(), nn.LayerNorm(800), nn.Linear(800, 40)).cuda()
    mean = copy.deepcopy(net).requires_grad_(False)
    swa = torch.optim.swa_utils.AveragedModel(net)
    opt = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    cp("ready")
    for step in range(2):
        loss = F.l1_loss(net(torch.randn(100, 400, device="cuda")), torch.zeros(100, 40, device="cuda"))
        opt.zero_grad(set_to_none=False)
        loss.backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 0.1)
        opt.step()
        schedule.step()
        with torch.no_grad():
            for a, b in zip(mean.parameters(), net.parameters()):
                a.mul_(0.99).add_(b, alpha=0.01)
        swa.update_parameters(net)
        cp(f"step {step}")
    state = {k: v.clone() for k, v in net.state_dict().items()}
    net.load_state_dict(mean.state_dict())
    cp("loaded")
    del state
    cp("dropped")


def w_checkpoint_sequential(cp):
    net = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]).cuda()
    x = torch.randn(256, 512, device="cuda")
    for segments in (1, 2, 4):
        out = checkpoint_sequential(net, segments, x, use_reentrant=False)
        cp(f"forward {segments}")
        out.mean().backward()
        del out
        cp(f"backward {segments}")


def w_accumulation_autocast(cp):
    net = nn.Sequential(nn.Linear(600, 1200), nn.ReLU(), nn.BatchNorm1d(1200), nn.Linear(1200, 200)).cuda()
    opt = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cuda")
    cp("ready")
    for step in range(2):
        opt.zero_grad()
        for _ in range(3):
            x, y = torch.randn(90, 600, device="cuda"), torch.randint(0, 200, (90,), device="cuda")
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(net(x), y) / 3
            scaler.scale(loss).backward()
        cp(f"accumulated {step}")
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        cp(f"step {step}")


def w_bfloat16_conv(cp):
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.SiLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.GroupNorm(8, 64),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).cuda()
    x, y = torch.randn(32, 3, 32, 32, device="cuda"), torch.randint(0, 10, (32,), device="cuda")

    def loss():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.cross_entropy(net(x), y)

    train(cp, loss, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))


def w_channels_last(cp):
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    net = net.cuda().to(memory_format=torch.channels_last)
    x = torch.randn(64, 3, 32, 32).cuda().to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (64,), device="cuda")
    train(cp, lambda: F.cross_entropy(net(x), y), torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4))


def w_mnist_conv(cp):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
            x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
            return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)

    net = Net().cuda()
    x, y = torch.randn(64, 1, 28, 28).cuda(), torch.randint(0, 10, (64,)).cuda()
    train(cp, lambda: F.nll_loss(net(x), y), torch.optim.Adadelta(net.parameters(), lr=1.0))
    net.eval()
    with torch.no_grad():
        for _ in range(2):
            output = net(torch.randn(1000, 1, 28, 28).cuda())
            F.nll_loss(output, torch.zeros(1000, dtype=torch.long).cuda(), reduction="sum").item()
    cp("tested")


def w_cifar_conv(cp):
    net = nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    ).cuda()
    x, y = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
    train(cp, lambda: F.cross_entropy(net(x.cuda()), y.cuda()), torch.optim.SGD(net.parameters(), 0.001, momentum=0.9), steps=3)


def w_depthwise(cp):
    def block(a, b, stride):
        return nn.Sequential(
            nn.Conv2d(a, a, 3, stride, 1, groups=a, bias=False),
            nn.BatchNorm2d(a),
            nn.ReLU6(),
            nn.Conv2d(a, b, 1, bias=False),
            nn.BatchNorm2d(b),
            nn.Hardswish(),
        )

    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), block(32, 64, 1), block(64, 128, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 20)
    )
    net = net.cuda()
    x, y = torch.randn(16, 3, 64, 64, device="cuda"), torch.randint(0, 20, (16,), device="cuda")
    train(cp, lambda: F.cross_entropy(net(x), y), torch.optim.RMSprop(net.parameters(), 0.01))


def w_transformer_translation(cp):
    net = nn.Transformer(128, 4, 2, 2, 256, 0.1, batch_first=True).cuda()
    source, target = nn.Embedding(3000, 128).cuda(), nn.Embedding(3000, 128).cuda()
    head = nn.Linear(128, 3000).cuda()
    a, b = torch.randint(1, 3000, (16, 20), device="cuda"), torch.randint(1, 3000, (16, 18), device="cuda")
    mask = nn.Transformer.generate_square_subsequent_mask(17, device="cuda")
    padding = torch.zeros(16, 20, dtype=torch.bool, device="cuda")
    padding[:, 15:] = True

    def loss():
        y = net(source(a), target(b[:, :-1]), tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        return F.cross_entropy(head(y).transpose(1, 2), b[:, 1:])

    parameters = [p for m in (net, source, target, head) for p in m.parameters()]
    train(cp, loss, torch.optim.Adam(parameters, 1e-4, betas=(0.9, 0.98), eps=1e-9))


def w_lstm_classifier(cp):
    emb, lstm, head = (
        nn.Embedding(5000, 100, padding_idx=0).cuda(),
        nn.LSTM(100, 128, 2, dropout=0.5, bidirectional=True).cuda(),
        nn.Linear(256, 2).cuda(),
    )
    ids = torch.randint(1, 5000, (30, 24), device="cuda")
    lengths = torch.tensor(sorted(range(7, 31), reverse=True))
    y = torch.randint(0, 2, (24,), device="cuda")

    def loss():
        packed = nn.utils.rnn.pack_padded_sequence(emb(ids), lengths)
        _, (h, _) = lstm(packed)
        return F.cross_entropy(head(torch.cat([h[-2], h[-1]], 1)), y)

    train(cp, loss, torch.optim.Adam([*emb.parameters(), *lstm.parameters(), *head.parameters()]))


def w_time_series(cp):
    lstm, head = nn.LSTM(4, 64, batch_first=True).cuda(), nn.Linear(64, 1).cuda()
    x, y = torch.randn(50, 30, 4, device="cuda"), torch.randn(50, 1, device="cuda")
    train(cp, lambda: F.mse_loss(head(lstm(x)[0][:, -1]), y), torch.optim.Adam([*lstm.parameters(), *head.parameters()]))


def w_diffusion(cp):
    net = nn.Sequential(nn.Conv2d(4, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 3, 3, padding=1)).cuda()
    betas = torch.linspace(1e-4, 0.02, 100, device="cuda")
    kept = torch.cumprod(1 - betas, 0)
    opt = torch.optim.AdamW(net.parameters())

    def loss():
        x = torch.randn(16, 3, 32, 32, device="cuda")
        t = torch.randint(0, 100, (16,), device="cuda")
        a = kept[t].view(-1, 1, 1, 1)
        noise = torch.randn_like(x)
        time = (t.float() / 100).view(-1, 1, 1, 1).expand(-1, 1, 32, 32)
        return F.mse_loss(net(torch.cat([a.sqrt() * x + (1 - a).sqrt() * noise, time], 1)), noise)

    train(cp, loss, opt)
    with torch.no_grad():
        x = torch.randn(8, 3, 32, 32, device="cuda")
        for i in reversed(range(98, 100)):
            noise = net(torch.cat([x, torch.full((8, 1, 32, 32), i / 100, device="cuda")], 1))
            x = (x - betas[i] / (1 - kept[i]).sqrt() * noise) / (1 - betas[i]).sqrt() + betas[i].sqrt() * torch.randn_like(x)
    cp("sampled")


def w_nearest_neighbours(cp):
    points, queries = torch.randn(20000, 32, device="cuda"), torch.randn(500, 32, device="cuda")
    cp("ready")
    distances = torch.cdist(queries, points)
    cp("distances")
    near, index = distances.topk(10, largest=False)
    cp("nearest")
    labels = torch.arange(20000, device="cuda") % 7
    votes = F.one_hot(labels[index], 7).sum(1).argmax(1)
    cp("votes")
    centres = points[:50].clone()
    for _ in range(2):
        nearest = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        counts = torch.bincount(nearest, minlength=50).clamp(min=1)
        centres = sums / counts.unsqueeze(1)
    cp("clustered")
    del distances, near, index, votes, sums, counts, nearest
    cp("dropped")


def w_factorization(cp):
    x = torch.randn(400, 100, device="cuda")
    cp("ready")
    u, s, v = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    cp("svd")
    scores = x @ v[:5].T
    cp("projected")
    covariance = torch.cov(x.T)
    values, vectors = torch.linalg.eigh(covariance)
    cp("eigh")
    factor = torch.linalg.cholesky(covariance + torch.eye(100, device="cuda"))
    solved = torch.cholesky_solve(torch.ones(100, 1, device="cuda"), factor)
    cp("cholesky")
    weights = torch.linalg.solve(x.T @ x + torch.eye(100, device="cuda"), x.T @ torch.randn(400, device="cuda"))
    inverse = torch.linalg.inv(covariance + torch.eye(100, device="cuda"))
    cp("solved")
    del u, s, v, scores, values, vectors, factor, solved, weights, inverse
    cp("dropped")
