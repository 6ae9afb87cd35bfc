"""Train a network of torchvision or transformers on made-up data, as a user's script would.

python train_network.py NETWORK sgd|adamw|bf16 BATCH [LENGTH]

The weights are random. bf16 is AdamW under autocast to bfloat16.
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

STEPS = 40
TOKENS = 1000

name, mode, batch, *length = sys.argv[1:]


def language_model(name: str) -> torch.nn.Module:
    import transformers as t

    models: dict[str, Callable[[], torch.nn.Module]] = {
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config()),
        "gpt2_medium": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=1024, n_layer=24, n_head=16)),
        "distilbert": lambda: t.DistilBertForMaskedLM(t.DistilBertConfig()),
        "electra": lambda: t.ElectraForMaskedLM(t.ElectraConfig()),
        "albert": lambda: t.AlbertForMaskedLM(
            t.AlbertConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072)
        ),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(decoder_start_token_id=0, pad_token_id=0)
        ),
        "opt": lambda: t.OPTForCausalLM(t.OPTConfig()),
        "llama": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(
                hidden_size=1024,
                intermediate_size=2816,
                num_hidden_layers=16,
                num_attention_heads=16,
            )
        ),
        "pythia": lambda: t.GPTNeoXForCausalLM(
            t.GPTNeoXConfig(
                hidden_size=1024,
                intermediate_size=4096,
                num_hidden_layers=16,
                num_attention_heads=16,
            )
        ),
    }
    return models[name]()


if length:
    model = language_model(name).cuda().train()
    ids = torch.randint(0, TOKENS, (int(batch), int(length[0])), device="cuda")

    def loss_of() -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss
else:
    import torchvision

    model = getattr(torchvision.models, name)(weights=None).cuda().train()
    x, y = (
        torch.randn(int(batch), 3, 224, 224, device="cuda"),
        torch.randint(0, 1000, (int(batch),), device="cuda"),
    )

    def loss_of() -> torch.Tensor:
        return F.cross_entropy(model(x), y)


parameters = model.parameters()
optimizer = (
    torch.optim.SGD(parameters, 1e-3, momentum=0.9)
    if mode == "sgd"
    else torch.optim.AdamW(parameters, 1e-4)
)
for _ in range(STEPS):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=mode == "bf16"):
        loss = loss_of()
    loss.backward()
    optimizer.step()
