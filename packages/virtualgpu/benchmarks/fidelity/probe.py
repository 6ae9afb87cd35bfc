"""What a real GPU answers to mistakes and to questions about itself: prints JSON. Each mistake runs in a process of its own.

usage: probe.py OUT.json
"""

import concurrent.futures as cf
import json
import os
import subprocess
import sys

MISTAKES = """
mm_devices|torch.ones(3,3,device='cuda')@torch.ones(3,3)
mm_devices2|torch.ones(3,3)@torch.ones(3,3,device='cuda')
linear_devices|nn.Linear(3,3)(torch.ones(2,3,device='cuda'))
linear_devices2|nn.Linear(3,3).cuda()(torch.ones(2,3))
bmm_devices|torch.bmm(torch.ones(1,3,3,device='cuda'),torch.ones(1,3,3))
cat_devices|torch.cat([torch.ones(3,device='cuda'),torch.ones(3)])
stack_devices|torch.stack([torch.ones(3),torch.ones(3,device='cuda')])
where_devices|torch.where(torch.ones(3,device='cuda')>0,torch.ones(3),torch.ones(3,device='cuda'))
inplace_devices|torch.ones(3).add_(torch.ones(3,device='cuda'))
cpu_plus_cuda|torch.ones(3)+torch.ones(3,device='cuda')
zero_dim_cuda|torch.ones(3)+torch.tensor(1.,device='cuda')
zero_dim_both|(torch.tensor(1.)+torch.tensor(1.,device='cuda')).device
embedding_devices|nn.Embedding(5,3).cuda()(torch.tensor([1]))
embedding_devices2|nn.Embedding(5,3)(torch.tensor([1],device='cuda'))
ce_devices|F.cross_entropy(torch.ones(2,3,device='cuda'),torch.tensor([0,1]))
mse_devices|F.mse_loss(torch.ones(3,device='cuda'),torch.ones(3))
conv_devices|nn.Conv2d(1,1,3)(torch.ones(1,1,5,5,device='cuda'))
conv_devices2|nn.Conv2d(1,1,3).cuda()(torch.ones(1,1,5,5))
bn_devices|nn.BatchNorm1d(3)(torch.ones(4,3,device='cuda'))
ln_devices|nn.LayerNorm(3)(torch.ones(4,3,device='cuda'))
lstm_devices|nn.LSTM(3,4)(torch.ones(2,1,3,device='cuda'))
index_cpu_by_cuda|torch.ones(3)[torch.tensor([0],device='cuda')]
index_cuda_by_cpu|torch.ones(3,device='cuda')[torch.tensor([0])].device
gather_devices|torch.ones(3,device='cuda').gather(0,torch.tensor([0]))
index_select_devices|torch.ones(3,device='cuda').index_select(0,torch.tensor([0]))
masked_devices|torch.ones(3,device='cuda').masked_fill(torch.ones(3)>0,0.)
sdpa_devices|F.scaled_dot_product_attention(torch.ones(1,1,2,8,device='cuda'),torch.ones(1,1,2,8),torch.ones(1,1,2,8))
optimizer_devices|(lambda p:(setattr(p,'grad',None),p.__setattr__('grad',torch.ones(3))))(torch.ones(3,device='cuda',requires_grad=True))
out_devices|torch.add(torch.ones(3,device='cuda'),1,out=torch.empty(3))
set_storage|torch.ones(3,device='cuda').set_(torch.ones(3).untyped_storage())
ordinal|torch.ones(3,device='cuda:9')
ordinal_to|torch.ones(3).to('cuda:9')
ordinal_set|torch.cuda.set_device(9)
ordinal_with|torch.cuda.device(9).__enter__()
ordinal_props|torch.cuda.get_device_properties(9)
ordinal_name|torch.cuda.get_device_name(9)
ordinal_sync|torch.cuda.synchronize(9)
ordinal_mem|torch.cuda.memory_allocated(9)
ordinal_stream|torch.cuda.Stream(device=9)
negative|torch.ones(3,device='cuda:-1')
int_mm|torch.ones(2,2,dtype=torch.int64,device='cuda')@torch.ones(2,2,dtype=torch.int64,device='cuda')
int_mm32|torch.ones(2,2,dtype=torch.int32,device='cuda')@torch.ones(2,2,dtype=torch.int32,device='cuda')
int_bmm|torch.ones(1,2,2,dtype=torch.int64,device='cuda')@torch.ones(1,2,2,dtype=torch.int64,device='cuda')
int_mv|torch.ones(2,2,dtype=torch.int64,device='cuda')@torch.ones(2,dtype=torch.int64,device='cuda')
int_dot|torch.ones(2,dtype=torch.int64,device='cuda')@torch.ones(2,dtype=torch.int64,device='cuda')
int_addmm|torch.addmm(torch.ones(2,2,dtype=torch.int64,device='cuda'),torch.ones(2,2,dtype=torch.int64,device='cuda'),torch.ones(2,2,dtype=torch.int64,device='cuda'))
int_baddbmm|torch.baddbmm(torch.ones(1,2,2,dtype=torch.int64,device='cuda'),torch.ones(1,2,2,dtype=torch.int64,device='cuda'),torch.ones(1,2,2,dtype=torch.int64,device='cuda'))
int_linear|F.linear(torch.ones(2,2,dtype=torch.int64,device='cuda'),torch.ones(2,2,dtype=torch.int64,device='cuda'))
bool_mm|torch.ones(2,2,dtype=torch.bool,device='cuda')@torch.ones(2,2,dtype=torch.bool,device='cuda')
int_conv|F.conv2d(torch.ones(1,1,3,3,dtype=torch.int64,device='cuda'),torch.ones(1,1,2,2,dtype=torch.int64,device='cuda'))
half_cholesky|torch.linalg.cholesky(torch.eye(3,device='cuda').half())
half_inv|torch.linalg.inv(torch.eye(3,device='cuda').half())
dtype_mismatch|torch.ones(2,2,device='cuda')@torch.ones(2,2,device='cuda').half()
int_mean|torch.ones(3,dtype=torch.int64,device='cuda').mean()
int_softmax|torch.ones(3,dtype=torch.int64,device='cuda').softmax(0)
numpy|torch.ones(3,device='cuda').numpy()
np_array|__import__('numpy').array(torch.ones(3,device='cuda'))
numpy_grad|torch.ones(3,device='cuda',requires_grad=True).numpy()
from_numpy|torch.from_numpy(torch.ones(3,device='cuda'))
legacy|torch.Tensor([1.,2.],device='cuda')
legacy_float|torch.FloatTensor([1.,2.],device='cuda')
legacy_size|torch.cuda.FloatTensor(2,3).shape
pin_cuda|torch.ones(3,device='cuda').pin_memory()
pin_create|torch.ones(3,device='cuda',pin_memory=True)
generator_cpu|torch.rand(3,device='cuda',generator=torch.Generator())
generator_cuda|torch.rand(3,generator=torch.Generator(device='cuda'))
elapsed_unrecorded|torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event(enable_timing=True))
elapsed_notiming|(lambda a,b:(a.record(),b.record(),torch.cuda.synchronize(),a.elapsed_time(b)))(torch.cuda.Event(),torch.cuda.Event())
elapsed_notready|(lambda a,b:(a.record(),torch.cuda._sleep(10**9),b.record(),a.elapsed_time(b)))(torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True))
oom|torch.empty(1<<40,dtype=torch.uint8,device='cuda')
oom_eb|torch.empty(1<<61,dtype=torch.uint8,device='cuda')
fraction_bad|torch.cuda.set_per_process_memory_fraction(1.5)
fraction_type|torch.cuda.set_per_process_memory_fraction(1)
load_device|(lambda f:(torch.save(torch.ones(3,device='cuda'),f),f.seek(0),torch.load(f,map_location='cuda:9')))(__import__('io').BytesIO())
dp_cpu_module|nn.DataParallel(nn.Linear(3,3))(torch.ones(2,3))
dp_ids|nn.DataParallel(nn.Linear(3,3).cuda(),device_ids=[0,9])
comm_gather_cpu|torch.nn.parallel.gather([torch.ones(3)],0)
item_many|torch.ones(3,device='cuda').item()
bool_many|bool(torch.ones(3,device='cuda'))
autocast_float64|(lambda:[None for _ in [0]])()
scaler_inf|torch.amp.GradScaler('cuda').unscale_(torch.optim.SGD([torch.ones(3,device='cuda',requires_grad=True)],.1))
one_hot_range|F.one_hot(torch.tensor([5],device='cuda'),3).sum().item()
index_assert|torch.ones(3,device='cuda')[torch.tensor([7],device='cuda')].sum().item()
embedding_assert|nn.Embedding(5,3).cuda()(torch.tensor([7],device='cuda')).sum().item()
gather_assert|torch.ones(3,device='cuda').gather(0,torch.tensor([7],device='cuda')).sum().item()
scatter_assert|torch.zeros(3,device='cuda').scatter_(0,torch.tensor([7],device='cuda'),1.).sum().item()
ce_assert|F.cross_entropy(torch.ones(2,3,device='cuda'),torch.tensor([0,7],device='cuda')).item()
nll_assert|F.nll_loss(torch.ones(2,3,device='cuda'),torch.tensor([0,7],device='cuda')).item()
index_put_assert|torch.zeros(3,device='cuda').__setitem__(torch.tensor([7],device='cuda'),1.) or torch.cuda.synchronize()
index_select_assert|torch.ones(3,device='cuda').index_select(0,torch.tensor([7],device='cuda')).sum().item()
take_assert|torch.ones(3,device='cuda').take(torch.tensor([7],device='cuda')).sum().item()
multinomial_assert|torch.tensor([-1.,2.],device='cuda').multinomial(1).item()
bce_assert|F.binary_cross_entropy(torch.tensor([2.],device='cuda'),torch.tensor([1.],device='cuda')).item()
assert_async|torch._assert_async(torch.tensor(False,device='cuda')) or torch.cuda.synchronize()
index_add_assert|torch.zeros(3,device='cuda').index_add_(0,torch.tensor([7],device='cuda'),torch.ones(1,device='cuda')).sum().item()
assert_then_alloc|[f() for f in (lambda:torch.ones(3,device='cuda')[torch.tensor([7],device='cuda')],lambda:torch.empty(10,device='cuda'),lambda:__import__('time').sleep(1),lambda:torch.zeros(10,device='cuda'))]
assert_then_cpu|[f() for f in (lambda:torch.ones(3,device='cuda')[torch.tensor([7],device='cuda')],lambda:torch.ones(3).cuda())]
assert_then_del|[f() for f in (lambda:torch.ones(3,device='cuda')[torch.tensor([7],device='cuda')],lambda:torch.cuda.empty_cache())]
type|type(torch.ones(3,device='cuda')).__name__,torch.ones(3,device='cuda').type(),torch.ones(3,device='cuda').half().type()
repr0|repr(torch.ones(3,device='cuda')),repr(torch.tensor(1.5,device='cuda')),str(torch.ones(2,device='cuda').requires_grad_()),f"{torch.tensor(1.5,device='cuda'):.2f}"
repr_param|repr(nn.Parameter(torch.ones(2,device='cuda')))
repr_empty|repr(torch.empty(0,device='cuda')),repr(torch.ones(2,2,dtype=torch.bool,device='cuda'))
rng_state|torch.cuda.get_rng_state().shape,torch.cuda.initial_seed()>0
stream_repr|repr(torch.cuda.current_stream()),torch.cuda.Stream().stream_id,torch.cuda.Stream().stream_id,torch.cuda.Stream(priority=-1).stream_id,repr(torch.cuda.Event())
event_repr|(lambda e:(e.record(),torch.cuda.synchronize(),repr(e)[:30]))(torch.cuda.Event())
cuda_int|torch.device(0),torch.zeros(1,device=0).device,torch.zeros(1).to(0).device,torch.zeros(1).cuda().device
properties|repr(torch.cuda.get_device_properties(0)),[ (k,str(getattr(torch.cuda.get_device_properties(0),k))) for k in dir(torch.cuda.get_device_properties(0)) if k[0]!='_']
nvml|torch.cuda.utilization(),torch.cuda.temperature(),torch.cuda.power_draw(),torch.cuda.clock_rate(),torch.cuda.memory_usage(),torch.cuda.device_memory_used()
arch|torch.cuda.get_arch_list(),torch.version.cuda,torch.backends.cudnn.version(),torch.cuda.nccl.version()
capability|torch.cuda.get_device_capability(),torch.accelerator.current_accelerator(),torch.accelerator.device_count()
stats_keys|sorted(torch.cuda.memory_stats().keys())
stats_zero|(torch.ones(3,device='cuda'),{k:v for k,v in torch.cuda.memory_stats().items() if v})[1]
summary|(torch.ones(3,device='cuda'),torch.cuda.memory_summary())[1]
snapshot|(lambda x:torch.cuda.memory._snapshot())(torch.ones(3,device='cuda'))
history|(torch.cuda.memory._record_memory_history(max_entries=100,stacks='python'),torch.ones(3,device='cuda').sum(),torch.cuda.memory._snapshot()['device_traces'])[2]
snapshot_full|(torch.cuda.memory._record_memory_history(max_entries=100,stacks='python'),[torch.ones(3,device='cuda')],torch.cuda.memory._snapshot())[2]
mem_info|(torch.cuda.mem_get_info(),torch.ones(1,device='cuda'),torch.cuda.mem_get_info(),torch.ones(9,9,device='cuda')@torch.ones(9,9,device='cuda'),torch.cuda.mem_get_info())[0::2]
host_stats|torch.cuda.host_memory_stats()
list_gpu_processes|torch.cuda.list_gpu_processes()
is_bf16|torch.cuda.is_bf16_supported(),torch.cuda.is_tf32_supported()
blas_size|[k for k in dir(torch._C) if k.startswith(('_cuda_','_accelerator_','_nccl_'))]
compile_|torch.cuda.CUDAGraph
to_sparse|torch.eye(3,device='cuda').to_sparse()
mempool|torch.cuda.MemPool().id
dlpack|torch.from_dlpack(torch.ones(3,device='cuda')).device
cai|sorted(torch.ones(3,device='cuda').__cuda_array_interface__)
legacy_new|torch.ones(3,device='cuda').new(2,2).device,torch.ones(3,device='cuda').new_tensor([1,2]).device
storage|torch.ones(3,device='cuda').untyped_storage().device,repr(torch.ones(1,device='cuda').storage()),torch.ones(3,device='cuda').is_shared()
deepcopy_nonleaf|__import__('copy').deepcopy(torch.ones(3,device='cuda',requires_grad=True)*2)
data_assign|(lambda p:(p.__setattr__('data',p.data.cuda()),type(p).__name__,p.device))(nn.Parameter(torch.ones(3)))
grad_mismatch|(lambda p:p.__setattr__('grad',torch.ones(3)))(torch.ones(3,device='cuda',requires_grad=True))
backward_gradient_cpu|torch.ones(3,device='cuda',requires_grad=True).mul(2).backward(torch.ones(3))
resize_|(lambda x:(x.resize_(100).shape,torch.cuda.memory_allocated()))(torch.ones(3,device='cuda'))
"""


def one(line):
    import warnings

    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    name, expression = line.split("|", 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            answer = ["ok", repr(eval(expression, dict(torch=torch, nn=nn, F=F)))]
        except BaseException as error:  # noqa: BLE001
            answer = [type(error).__name__, str(error)]
        after = None
        if name.endswith("assert") or name.startswith("assert"):
            try:
                torch.zeros(1, device="cuda").item()
            except BaseException as error:  # noqa: BLE001
                after = [type(error).__name__, str(error)]
    return {"name": name, "expression": expression, "answer": answer, "after": after, "warnings": [str(w.message)[:300] for w in told]}


def run(line):
    p = subprocess.run([sys.executable, __file__, "--one", line], capture_output=True, text=True, timeout=200)
    got = [x for x in p.stdout.splitlines() if x.startswith("RESULT ")]
    return (
        json.loads(got[0][7:]) | {"stderr": p.stderr[-600:]}
        if got
        else {"name": line.split("|")[0], "crash": p.returncode, "stderr": p.stderr[-600:]}
    )


def shell(command):
    p = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    return [p.returncode, p.stdout[-6000:], p.stderr[-500:]]


def main():
    with cf.ThreadPoolExecutor(14) as pool:
        rows = list(pool.map(run, MISTAKES.strip().splitlines()))
    tools = {
        c: shell(c)
        for c in (
            "nvidia-smi",
            "nvidia-smi -L",
            "nvidia-smi --query-gpu=index,uuid,utilization.gpu,memory.total,memory.used,memory.free,driver_version,name,gpu_serial,display_active,display_mode,temperature.gpu --format=csv,noheader,nounits",
            "nvidia-smi --query-gpu=name,memory.total --format=csv",
            "nvidia-smi topo -m",
            "nvidia-smi --help-query-gpu | head -60",
        )
    }
    import torch

    json.dump(
        {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": torch.cuda.get_device_name(0),
            "count": torch.cuda.device_count(),
            "env": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
            "rows": rows,
            "tools": tools,
        },
        open(sys.argv[1], "w"),
        indent=1,
    )
    print(len(rows), [r["name"] for r in rows if "crash" in r])


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print("RESULT " + json.dumps(one(sys.argv[2])))
    else:
        main()
