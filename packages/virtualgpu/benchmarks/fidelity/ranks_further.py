"""torchrun --nproc-per-node 2 ranks_further.py OUT.json KIND [names…]: memory and time of training programs on two GPUs. Plain torch.

KIND is ddp, fsdp, tp or pp. h100/ranks_further.json.gz holds what two H100s answered (torch 2.11.0+cu130, driver 580.159.04,
2026-11-24): three runs of ddp and fsdp, two of the others. On virtual GPUs, for compare_ranks.py:

    python -m labkit torchrun --ranks 2 --like H100 --virtual-time --no-values benchmarks/fidelity/ranks_further.py OUT.json KIND
"""
import contextlib, gc, json, os, sys, time, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

local, rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
out, kind, names = sys.argv[1], sys.argv[2], sys.argv[3:]
gpu = torch.device("cuda", local)
torch.cuda.set_device(gpu)
dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "fsdp" else "nccl")
results, points = {}, {}


def figures():
    torch.cuda.synchronize()
    return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()]


def note(name):
    points[name] = figures()


def fresh():
    points.clear()
    gc.collect(); torch.cuda.synchronize(); dist.barrier(); torch.cuda.synchronize(); time.sleep(0.25); dist.barrier(); torch.cuda.synchronize()
    torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats(); torch.manual_seed(rank)


def gather(value):
    values = [None] * world
    dist.all_gather_object(values, value)
    return values


def timed(step, n=7, warm=3):
    for _ in range(warm):
        step()
    times = []
    for _ in range(n):
        torch.cuda.synchronize(); dist.barrier(); torch.cuda.synchronize()
        begin = time.perf_counter(); step(); torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times)[n // 2]


def told(step):
    seconds = timed(step)
    note("after")
    return {"points": gather(dict(points)), "seconds": max(gather(seconds))}


def training(net, opt, loss, accumulate=0, quiet=None, before_step=None):
    """A step is `accumulate` backwards under `quiet()`, one more, the optimizer. `loss()` is the forward."""
    def step(name=None):
        for _ in range(accumulate):
            with quiet():
                loss().backward()
        value = loss()
        if name: note(name + " forward")
        value.backward()
        if name: note(name + " backward")
        if before_step: before_step()
        opt.step(); opt.zero_grad()
        if name: note(name + " step")
    step("first"); step("second")
    return told(step)


# Networks

class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.size = d // heads

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, d=768, heads=12, hidden=3072):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = Attention(d, heads)
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Language(nn.Module):
    def __init__(self, layers=4, d=768, words=8192, heads=12, tied=False):
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.layers = nn.ModuleList(Layer(d, heads, 4 * d) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, words, bias=False)
        if tied: self.head.weight = self.embed.weight
        self.checkpointed = False

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(self.norm(x))


class Conv(nn.Module):
    def __init__(self, width=64, blocks=6):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(blocks)])
        self.last = nn.Linear(width, 1000)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)).mean((2, 3)))


def words(batch=4, length=256, count=8192):
    return torch.randint(count, (batch, length), device="cuda"), torch.randint(count, (batch, length), device="cuda")


def cross(net, x, y):
    return F.cross_entropy(net(x).flatten(0, 1), y.flatten())


def mlp(width, layers=6):
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())])


# DDP

def ddp_language(optimizer=lambda p: torch.optim.AdamW(p, 1e-4), hook=None, tied=False, checkpointed=False, clip=False, autocast=False, accumulate=0, **options):
    fresh()
    net = Language(tied=tied).cuda(); net.checkpointed = checkpointed
    note("model")
    net = DDP(net, device_ids=[local], **options)
    if hook: net.register_comm_hook(None, hook)
    note("wrapped")
    opt = optimizer(net.parameters())
    x, y = words()

    def loss():
        with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
            return cross(net, x, y)
    clipping = (lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0)) if clip else None
    return training(net, opt, loss, accumulate, net.no_sync, clipping)


def ddp_conv(sync=False):
    fresh()
    net = Conv().cuda()
    if sync: net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    note("model")
    net = DDP(net, device_ids=[local], bucket_cap_mb=1)
    note("wrapped")
    opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    x, y = torch.randn(32, 3, 64, 64, device="cuda"), torch.randint(1000, (32,), device="cuda")
    return training(net, opt, lambda: F.cross_entropy(net(x), y))


def ddp_hook():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    return ddp_language(hook=bf16_compress_hook)


def ddp_zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    return ddp_language(lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=1e-4), gradient_as_bucket_view=True)


# FSDP2

def fsdp(offload=False, mixed=False, accumulate=0, checkpointed=False, clip=False, keep=False, meta=False, prefetch=False, fused=False):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    fresh()
    options = {"mesh": init_device_mesh("cuda", (world,)), "reshard_after_forward": not keep}
    if offload: options["offload_policy"] = CPUOffloadPolicy()
    if mixed: options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if meta:
        with torch.device("meta"):
            net = Language()
    else:
        net = Language() if offload else Language().cuda()
    net.checkpointed = checkpointed
    note("model")
    for layer in net.layers: fully_shard(layer, **options)
    fully_shard(net, **options)
    if meta:
        net.to_empty(device="cuda")
        for p in net.parameters(): nn.init.normal_(p, std=0.02)
    if prefetch:
        layers = list(net.layers)
        for a, b in zip(layers, layers[1:]): a.set_modules_to_forward_prefetch([b])
        for a, b in zip(layers[1:], layers): a.set_modules_to_backward_prefetch([b])
    note("wrapped")
    opt = torch.optim.AdamW(net.parameters(), 1e-4, fused=True) if fused else torch.optim.AdamW(net.parameters(), 1e-4)
    x, y = words()

    @contextlib.contextmanager
    def quiet():
        net.set_requires_gradient_sync(False)
        yield
        net.set_requires_gradient_sync(True)
    clipping = (lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0)) if clip else None
    return training(net, opt, lambda: cross(net, x, y), accumulate, quiet, clipping)


# Tensor parallelism

def tp_language(sequence=False, loss_parallel=False, data=False, embedded=False):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp
    fresh()
    mesh = init_device_mesh("cuda", (1, world) if data != "outer" else (world, 1), mesh_dim_names=("dp", "tp"))
    net = Language().cuda()
    note("model")
    plan = {"attention.q": tp.ColwiseParallel(), "attention.k": tp.ColwiseParallel(), "attention.v": tp.ColwiseParallel(),
            "up": tp.ColwiseParallel(), "attention.o": tp.RowwiseParallel(), "down": tp.RowwiseParallel()}
    if sequence:
        plan |= {"norm1": tp.SequenceParallel(), "norm2": tp.SequenceParallel(),
                 "attention": tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                 "up": tp.ColwiseParallel(input_layouts=Shard(1)),
                 "attention.o": tp.RowwiseParallel(output_layouts=Shard(1)), "down": tp.RowwiseParallel(output_layouts=Shard(1))}
    for layer in net.layers: tp.parallelize_module(layer, mesh["tp"], dict(plan))
    top = {}
    if sequence:
        top = {"embed": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": tp.SequenceParallel(),
               "head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1) if loss_parallel else Replicate(), use_local_output=not loss_parallel)}
    elif loss_parallel:
        top = {"head": tp.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    elif embedded:
        top = {"embed": tp.RowwiseParallel(input_layouts=Replicate()), "head": tp.ColwiseParallel(output_layouts=Replicate())}
    if top: tp.parallelize_module(net, mesh["tp"], top)
    if data:
        for layer in net.layers: fully_shard(layer, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
    note("wrapped")
    opt = torch.optim.AdamW(net.parameters(), 1e-4, foreach=None if sequence or data else False)
    x, y = words()

    class Stepping:  # loss parallelism wants the backward inside its context
        def __init__(self): self.value = cross(net, x, y)
        def backward(self): self.value.backward()
    with tp.loss_parallel() if loss_parallel else contextlib.nullcontext():
        return training(net, opt, Stepping)


def dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    fresh()
    mesh = init_device_mesh("cuda", (world,))
    a = distribute_tensor(torch.randn(2048, 2048, device="cuda"), mesh, [Shard(0)]).requires_grad_()
    b = distribute_tensor(torch.randn(2048, 2048, device="cuda"), mesh, [Shard(1)]).requires_grad_()
    note("distributed")

    def step():
        c = (a @ b.redistribute(mesh, [Replicate()])).relu()
        c.redistribute(mesh, [Shard(1)]).square().mean().full_tensor().backward()
        a.grad = b.grad = None
    step(); note("first")
    return told(step)


# Pipelines

def pipeline(schedule, splits=4, stages=1, kind="layers", adam=False):
    from torch.distributed import pipelining
    fresh()
    make = (lambda: Layer()) if kind == "layers" else (lambda: mlp(2048, 2))
    mine = [nn.Sequential(make(), make()).cuda() for _ in range(stages)]
    note("model")
    pieces = [pipelining.PipelineStage(part, rank + world * i, world * stages, gpu) for i, part in enumerate(mine)]
    run = getattr(pipelining, "Schedule" + schedule)(pieces if stages > 1 else pieces[0], splits, loss_fn=lambda y, t: (y - t).square().mean())
    x = torch.randn(16, 256, 768, device="cuda") if kind == "layers" else torch.randn(1024, 2048, device="cuda")
    parameters = [p for part in mine for p in part.parameters()]
    opt = torch.optim.Adam(parameters, 1e-4) if adam else None

    def step():
        arguments = [x] if rank == 0 else []
        if rank == world - 1: run.step(*arguments, target=torch.zeros_like(x))
        else: run.step(*arguments)
        if opt: opt.step(); opt.zero_grad()
        else:
            for p in parameters: p.grad = None
    step(); note("first"); step(); note("second")
    return told(step)


PROGRAMS = {
    "ddp": {
        "ddp clip tied checkpoint": lambda: ddp_language(tied=True, checkpointed=True, clip=True, static_graph=True),
        "ddp no_sync autocast": lambda: ddp_language(autocast=True, accumulate=3, bucket_cap_mb=5, gradient_as_bucket_view=True),
        "ddp bf16 hook": ddp_hook, "ddp zero": ddp_zero, "ddp conv": ddp_conv, "ddp conv sync": lambda: ddp_conv(sync=True),
    },
    "fsdp": {
        "fsdp mixed": lambda: fsdp(mixed=True, fused=True), "fsdp offload": lambda: fsdp(offload=True), "fsdp accumulate": lambda: fsdp(accumulate=2),
        "fsdp checkpoint clip": lambda: fsdp(checkpointed=True, clip=True), "fsdp prefetch keep": lambda: fsdp(prefetch=True, keep=True), "fsdp meta": lambda: fsdp(meta=True),
    },
    "tp": {
        "tp language": tp_language, "tp embedded": lambda: tp_language(embedded=True), "tp sequence": lambda: tp_language(sequence=True),
        "tp loss": lambda: tp_language(sequence=True, loss_parallel=True), "tp dtensor": dtensor,
        "mesh fsdp tp": lambda: tp_language(data=True), "mesh outer": lambda: tp_language(data="outer"),
    },
    "pp": {
        "pp gpipe 8 adam": lambda: pipeline("GPipe", 8, adam=True), "pp 1f1b 8": lambda: pipeline("1F1B", 8), "pp 1f1b mlp": lambda: pipeline("1F1B", 4, kind="mlp", adam=True),
        "pp interleaved": lambda: pipeline("Interleaved1F1B", 4, stages=2), "pp looped": lambda: pipeline("LoopedBFS", 4, stages=2, kind="mlp"),
        "pp zero bubble": lambda: pipeline("InterleavedZeroBubble", 4, stages=2, kind="mlp"),
    },
}
for name in names or PROGRAMS[kind]:
    try:
        results[name] = PROGRAMS[kind][name]()
    except Exception as error:
        results[name] = f"{type(error).__name__}: {str(error)[:400]}"
        if os.environ.get("RAISE"): raise
    r = results[name]
    if rank == 0 or isinstance(r, str):
        print(name, r if isinstance(r, str) else (round(r["seconds"] * 1e3, 2), [round(p["after"][2] / 2**20, 1) for p in r["points"]]), flush=True)
    if rank == 0:
        json.dump({"torch": torch.__version__, "device": torch.cuda.get_device_name(), "world": world, "results": results}, open(out, "w"), indent=0)
dist.destroy_process_group()
