"""What each operator asks of the caching allocator on the real device: the sequence of allocations and frees, forward and
backward, first call (cold: workspaces and handles too) and second (warm).

usage: operators.py OUT.json shared|FILE     every case in a process of its own; FILE holds a case a line
A case is a line of Python: setup ; expression. `t(shape, dtype)` makes an input that requires a gradient where it can.
"""

import json
import sys

CASES = {
    "shared": """
add|x=t(1000,300);y=t(1000,300)|x+y
mul_broadcast|x=t(64,1,300);y=t(17,300)|x*y
div_scalar|x=t(1000,300)|x/3
pow|x=t(1000,300)|x**3
exp|x=t(1000,300)|x.exp()
sigmoid|x=t(1000,300)|x.sigmoid()
tanh_half|x=t(1000,300,dtype=h)|x.tanh()
gelu|x=t(1000,300)|F.gelu(x)
silu|x=t(1000,300)|F.silu(x)
relu_|x=t(1000,300)|F.relu_(x*1)
leaky_relu|x=t(1000,300)|F.leaky_relu(x)
where|x=t(1000,300)|torch.where(x>0,x,-x)
clamp|x=t(1000,300)|x.clamp(-1,1)
maximum|x=t(1000,300);y=t(1000,300)|torch.maximum(x,y)
compare|x=t(1000,300)|x>0
to_half|x=t(1000,300)|x.half()
to_double|x=t(1000,300)|x.double()
contiguous_t|x=t(1000,300)|x.t().contiguous()
sum_all|x=t(1000,300)|x.sum()
sum_big|x=t(4000,3000)|x.sum()
sum_dim0|x=t(1000,300)|x.sum(0)
sum_dim0_tall|x=t(100000,30)|x.sum(0)
sum_dim1|x=t(1000,300)|x.sum(1)
sum_half|x=t(4000,3000,dtype=h)|x.sum()
mean_double|x=t(4000,3000,dtype=torch.float64)|x.mean()
mean_keep|x=t(8,64,56,56)|x.mean((2,3),keepdim=True)
max_all|x=t(1000,300)|x.max()
max_dim|x=t(1000,300)|x.max(1)[0]
argmax|x=t(1000,300)|x.argmax(1)
norm|x=t(1000,300)|x.norm()
std|x=t(1000,300)|x.std()
var_dim|x=t(1000,300)|x.var(0)
logsumexp|x=t(1000,300)|x.logsumexp(1)
prod|x=t(1000,300)|x.prod(1)
any|x=t(1000,300)|(x>0).any()
cumsum|x=t(1000,300)|x.cumsum(1)
cumsum_flat|x=t(1000000)|x.cumsum(0)
softmax|x=t(64,1000)|x.softmax(1)
softmax_dim0|x=t(64,1000)|x.softmax(0)
softmax_half|x=t(64,8,128,128,dtype=h)|x.softmax(-1)
log_softmax|x=t(64,1000)|x.log_softmax(1)
cross_entropy|x=t(64,1000);y=torch.randint(0,1000,(64,),device=d)|F.cross_entropy(x,y)
cross_entropy_smooth|x=t(64,1000);y=torch.randint(0,1000,(64,),device=d)|F.cross_entropy(x,y,label_smoothing=0.1)
mse|x=t(64,1000);y=t(64,1000)|F.mse_loss(x,y)
l1|x=t(64,1000);y=t(64,1000)|F.l1_loss(x,y)
bce_logits|x=t(64,1000);y=torch.rand(64,1000,device=d)|F.binary_cross_entropy_with_logits(x,y)
layer_norm|m=nn.LayerNorm(768).to(d);x=t(32,128,768)|m(x)
layer_norm_half|m=nn.LayerNorm(768).to(d).half();x=t(32,128,768,dtype=h)|m(x)
rms_norm|m=nn.RMSNorm(768).to(d);x=t(32,128,768)|m(x)
group_norm|m=nn.GroupNorm(8,64).to(d);x=t(8,64,28,28)|m(x)
batch_norm2d|m=nn.BatchNorm2d(64).to(d);x=t(8,64,28,28)|m(x)
batch_norm2d_eval|m=nn.BatchNorm2d(64).to(d).eval();x=t(8,64,28,28)|m(x)
batch_norm1d|m=nn.BatchNorm1d(300).to(d);x=t(1000,300)|m(x)
instance_norm|m=nn.InstanceNorm2d(64).to(d);x=t(8,64,28,28)|m(x)
dropout|x=t(1000,300)|F.dropout(x,0.5)
dropout_half|x=t(1000,300,dtype=h)|F.dropout(x,0.1)
dropout_eval|x=t(1000,300)|F.dropout(x,0.5,False)
linear|m=nn.Linear(512,300).to(d);x=t(128,512)|m(x)
linear_3d|m=nn.Linear(512,300).to(d);x=t(8,16,512)|m(x)
linear_nobias|m=nn.Linear(512,300,bias=False).to(d);x=t(128,512)|m(x)
linear_half|m=nn.Linear(512,300).to(d).half();x=t(128,512,dtype=h)|m(x)
linear_double|m=nn.Linear(512,300).to(d).double();x=t(128,512,dtype=torch.float64)|m(x)
bilinear|m=nn.Bilinear(20,30,40).to(d);x=t(64,20);y=t(64,30)|m(x,y)
matmul|x=t(512,300);y=t(300,200)|x@y
matmul_vec|x=t(512,300);y=t(300)|x@y
bmm|x=t(16,64,32);y=t(16,32,48)|torch.bmm(x,y)
matmul_4d|x=t(4,8,64,32);y=t(4,8,32,64)|x@y
einsum|x=t(8,64,32);y=t(32,48)|torch.einsum('bij,jk->bik',x,y)
baddbmm|x=t(16,64,48);y=t(16,64,32);z=t(16,32,48)|torch.baddbmm(x,y,z)
embedding|m=nn.Embedding(5000,256).to(d);i=torch.randint(0,5000,(32,64),device=d)|m(i)
embedding_bag|m=nn.EmbeddingBag(5000,256).to(d);i=torch.randint(0,5000,(32,64),device=d)|m(i)
one_hot|i=torch.randint(0,100,(1000,),device=d)|F.one_hot(i,100)
gather|x=t(1000,300);i=torch.randint(0,300,(1000,7),device=d)|x.gather(1,i)
index_select|x=t(1000,300);i=torch.randint(0,1000,(77,),device=d)|x.index_select(0,i)
index_long|x=t(1000,300);i=torch.randint(0,1000,(77,),device=d)|x[i]
index_mask|x=t(1000,300)|x[x>0]
masked_fill|x=t(1000,300)|x.masked_fill(x>0,0.)
nonzero|x=t(1000,300)|(x>0).nonzero()
scatter_add|x=t(1000,300);i=torch.randint(0,1000,(1000,300),device=d)|torch.zeros(1000,300,device=d).scatter_add(0,i,x)
cat|x=t(1000,300);y=t(500,300)|torch.cat([x,y])
stack|x=t(1000,300);y=t(1000,300)|torch.stack([x,y])
chunk_sum|x=t(1000,300)|x.chunk(4)[1]*2
pad|x=t(8,3,32,32)|F.pad(x,(1,1,1,1))
pad_reflect|x=t(8,3,32,32)|F.pad(x,(1,1,1,1),mode='reflect')
flip|x=t(1000,300)|x.flip(0)
roll|x=t(1000,300)|x.roll(3,0)
repeat|x=t(100,30)|x.repeat(4,2)
expand_add|x=t(1,300);y=t(1000,300)|x.expand(1000,300)+y
tril|x=t(512,512)|x.tril()
sort|x=t(1000,300)|x.sort(1)[0]
sort_flat|x=t(1000000)|x.sort()[0]
topk|x=t(1000,300)|x.topk(5,1)[0]
unique|i=torch.randint(0,100,(10000,),device=d)|i.unique()
max_pool2d|x=t(8,64,56,56)|F.max_pool2d(x,2)
avg_pool2d|x=t(8,64,56,56)|F.avg_pool2d(x,2)
adaptive_avg|x=t(8,64,56,56)|F.adaptive_avg_pool2d(x,1)
interpolate|x=t(8,3,32,32)|F.interpolate(x,scale_factor=2,mode='bilinear')
conv2d_3x3|m=nn.Conv2d(32,64,3,padding=1).to(d);x=t(16,32,28,28)|m(x)
conv2d_1x1|m=nn.Conv2d(64,128,1).to(d);x=t(16,64,28,28)|m(x)
conv2d_7x7s2|m=nn.Conv2d(3,64,7,stride=2,padding=3).to(d);x=t(16,3,112,112)|m(x)
conv2d_half|m=nn.Conv2d(32,64,3,padding=1).to(d).half();x=t(16,32,28,28,dtype=h)|m(x)
conv2d_depthwise|m=nn.Conv2d(64,64,3,padding=1,groups=64).to(d);x=t(16,64,28,28)|m(x)
conv2d_channels_last|m=nn.Conv2d(32,64,3,padding=1).to(d).to(memory_format=torch.channels_last);x=t(16,32,28,28).detach().to(memory_format=torch.channels_last).requires_grad_()|m(x)
conv1d|m=nn.Conv1d(32,64,5,padding=2).to(d);x=t(16,32,200)|m(x)
conv_transpose2d|m=nn.ConvTranspose2d(64,32,2,stride=2).to(d);x=t(16,64,14,14)|m(x)
attention_fp32|q=t(4,8,128,64);k=t(4,8,128,64);v=t(4,8,128,64)|F.scaled_dot_product_attention(q,k,v)
attention_fp32_causal|q=t(4,8,128,64);k=t(4,8,128,64);v=t(4,8,128,64)|F.scaled_dot_product_attention(q,k,v,is_causal=True)
attention_half|q=t(4,8,128,64,dtype=h);k=t(4,8,128,64,dtype=h);v=t(4,8,128,64,dtype=h)|F.scaled_dot_product_attention(q,k,v)
attention_bf16_causal|q=t(4,8,200,64,dtype=b);k=t(4,8,200,64,dtype=b);v=t(4,8,200,64,dtype=b)|F.scaled_dot_product_attention(q,k,v,is_causal=True)
attention_mask|q=t(4,8,128,64);k=t(4,8,128,64);v=t(4,8,128,64);a=torch.ones(128,128,dtype=torch.bool,device=d).tril()|F.scaled_dot_product_attention(q,k,v,attn_mask=a)
attention_dropout|q=t(4,8,128,64);k=t(4,8,128,64);v=t(4,8,128,64)|F.scaled_dot_product_attention(q,k,v,dropout_p=0.1)
mha|m=nn.MultiheadAttention(256,4,batch_first=True).to(d);x=t(8,100,256)|m(x,x,x)[0]
mha_noweights|m=nn.MultiheadAttention(256,4,batch_first=True).to(d);x=t(8,100,256)|m(x,x,x,need_weights=False)[0]
lstm|m=nn.LSTM(128,256,2,batch_first=True).to(d);x=t(16,50,128)|m(x)[0]
gru|m=nn.GRU(128,256,batch_first=True).to(d);x=t(16,50,128)|m(x)[0]
rnn_cell|m=nn.RNNCell(128,256).to(d);x=t(16,128)|m(x)
lstm_cell|m=nn.LSTMCell(128,256).to(d);x=t(16,128)|m(x)[0]
randperm|pass|torch.randperm(100000,device=d)
randint|pass|torch.randint(0,9,(1000,300),device=d)
multinomial|x=torch.rand(100,1000,device=d)|x.multinomial(5)
bernoulli|x=torch.rand(1000,300,device=d)|x.bernoulli()
linspace|pass|torch.linspace(0,1,100000,device=d)
cdist|x=t(200,64);y=t(300,64)|torch.cdist(x,y)
cosine|x=t(200,64);y=t(200,64)|F.cosine_similarity(x,y)
inverse|x=torch.randn(64,64,device=d)|torch.linalg.inv(x)
cholesky|x=torch.eye(64,device=d)|torch.linalg.cholesky(x)
fft|x=t(64,1000)|torch.fft.rfft(x).abs()
sgd|m=nn.Sequential(nn.Linear(300,300),nn.Linear(300,300)).to(d);o=torch.optim.SGD(m.parameters(),0.1);[p.__setattr__('grad',torch.ones_like(p)) for p in m.parameters()]|o.step()
sgd_momentum_wd|m=nn.Sequential(nn.Linear(300,300),nn.Linear(300,300)).to(d);o=torch.optim.SGD(m.parameters(),0.1,momentum=0.9,weight_decay=0.1);[p.__setattr__('grad',torch.ones_like(p)) for p in m.parameters()]|o.step()
adam|m=nn.Sequential(nn.Linear(300,300),nn.Linear(300,300)).to(d);o=torch.optim.Adam(m.parameters());[p.__setattr__('grad',torch.ones_like(p)) for p in m.parameters()]|o.step()
adamw|m=nn.Sequential(nn.Linear(300,300),nn.Linear(300,300)).to(d);o=torch.optim.AdamW(m.parameters());[p.__setattr__('grad',torch.ones_like(p)) for p in m.parameters()]|o.step()
adam_fused|m=nn.Sequential(nn.Linear(300,300),nn.Linear(300,300)).to(d);o=torch.optim.Adam(m.parameters(),fused=True);[p.__setattr__('grad',torch.ones_like(p)) for p in m.parameters()]|o.step()
clip_grad_norm|m=nn.Sequential(nn.Linear(300,300),nn.Linear(300,300)).to(d);[p.__setattr__('grad',torch.ones_like(p)) for p in m.parameters()]|torch.nn.utils.clip_grad_norm_(m.parameters(),1.)
autocast_linear|m=nn.Linear(512,300).to(d);x=t(128,512)|ac(m,x,h)
autocast_bf16_mlp|m=nn.Sequential(nn.Linear(512,300),nn.GELU(),nn.LayerNorm(300),nn.Linear(300,10)).to(d);x=t(128,512)|ac(m,x,b)
autocast_conv|m=nn.Sequential(nn.Conv2d(16,32,3),nn.BatchNorm2d(32),nn.ReLU()).to(d);x=t(8,16,28,28)|ac(m,x,h)
item|x=torch.ones(1,device=d)|x.item()
print|x=torch.ones(3,3,device=d)|repr(x)
isnan_any|x=torch.ones(1000,300,device=d)|x.isnan().any().item()
allclose|x=torch.ones(1000,300,device=d)|torch.allclose(x,x)
equal|x=torch.ones(1000,300,device=d)|torch.equal(x,x)
"""
}


def one(line):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    d, h, b = "cuda", torch.float16, torch.bfloat16
    torch.manual_seed(0)

    def t(*shape, dtype=torch.float32):
        return torch.randn(*shape, device=d).to(dtype).requires_grad_()

    def ac(m, x, dtype):
        with torch.autocast("cuda", dtype=dtype):
            return m(x)

    name, setup, expression = line.split("|", 2)
    scope = dict(torch=torch, nn=nn, F=F, t=t, d=d, h=h, b=b, ac=ac)
    exec(setup, scope)

    def recorded(f):
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history(max_entries=10000, context=None)
        try:
            r = f()
            torch.cuda.synchronize()
        finally:
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(enabled=None)
        short = {"alloc": "+", "free_completed": "-", "segment_alloc": "S", "segment_free": "s"}
        return r, [[short[e["action"]], e["size"]] for e in trace if e["action"] in short]

    out = {}
    for turn in ("cold", "warm"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            r, events = recorded(lambda: eval(expression, scope))
        except Exception as e:
            return {"name": name, "error": f"{type(e).__name__}: {e}"[:300]}
        out[turn] = {
            "forward": events,
            "allocated": torch.cuda.memory_allocated() - before,
            "peak": torch.cuda.max_memory_allocated() - before,
        }
        if isinstance(r, torch.Tensor) and r.requires_grad:
            g = torch.ones_like(r)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            try:
                _, events = recorded(lambda: r.backward(g))
                out[turn].update(
                    backward=events,
                    backward_allocated=torch.cuda.memory_allocated() - before,
                    backward_peak=torch.cuda.max_memory_allocated() - before,
                )
            except Exception as e:
                out[turn]["backward_error"] = f"{type(e).__name__}: {e}"[:200]
            for v in list(scope.values()):
                if isinstance(v, torch.Tensor):
                    v.grad = None
                if isinstance(v, nn.Module):
                    v.zero_grad()
            del g
        del r
    return {"name": name, "line": line, **out}


def main():
    out, which = sys.argv[1], sys.argv[2]
    text = CASES[which] if which in CASES else open(which).read()
    lines = text.strip().splitlines()
    import torch
    from forked import forked

    gpus = torch.cuda.device_count()  # asks the driver's library: CUDA itself is not touched before the fork
    results = []
    try:
        for line, result in zip(lines, forked(one, lines, 10 * gpus, gpus)):
            results.append(result if "name" in result else {"name": line.split("|")[0], **result})
    except KeyboardInterrupt:
        print("interrupted: what was recorded is written")
    json.dump(
        {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": torch.cuda.get_device_name(0),
            "legend": "+ alloc, - free, S segment allocated, s segment freed; sizes as requested, in bytes; cold: first call in the process",
            "cases": results,
        },
        open(out, "w"),
        separators=(",", ":"),
    )
    bad = [
        (r["name"], r.get("error") or r["warm"].get("backward_error"))
        for r in results
        if "error" in r or "backward_error" in r.get("warm", {})
    ]
    print(f"{len(results)} cases, {len(bad)} with errors", bad)


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print("RESULT " + json.dumps(one(sys.argv[2])))
    else:
        main()
