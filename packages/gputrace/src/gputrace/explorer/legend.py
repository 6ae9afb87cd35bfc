"""What each word of the explorer's legend means."""

SPANS = {
    "kernel": "A kernel that a GPU ran.",
    "kernel, backward": "A kernel that a backward pass launched.",
    "collective": "A kernel of NCCL, which exchanges data with other ranks.",
    "copy host to GPU": "A copy from the computer's memory to a GPU's.",
    "copy GPU to host": "A copy from a GPU's memory to the computer's.",
    "copy GPU to GPU": "A copy from one GPU's memory to another's.",
    "launch": "The time that the host took to queue a kernel or a copy.",
    "host waits": "The host stood still until a GPU had finished some work.",
    "phase": "A forward pass, a backward pass or a step of the optimizer, as the host runs it.",
    "rank waits": "A rank was ready for a collective and waited for the rank that came last.",
}
LINES = {
    "race": (
        "race",
        "Two launches use the same memory, and nothing orders them. The arrow leads from the one "
        "that was launched first to the other.",
    ),
    "collective": (
        "same collective",
        "Connects the spans of one collective on all its ranks, which end together.",
    ),
    "wait": (
        "stream waits",
        "A stream goes on only when an event of another stream has happened.",
    ),
}
CATEGORIES = {
    "parameters": "Parameters and buffers of modules.",
    "gradients": "Gradients of parameters.",
    "activations": "Results that a forward pass computes and that the backward pass needs.",
    "optimizer state": "What the optimizer keeps for each parameter, such as Adam's averages.",
    "workspace": "Memory that cuBLAS and other libraries take for their own use.",
    "other": "All other tensors, such as the inputs and the loss.",
    "in flight": (
        "Memory that the program has freed, but that another stream may still use. The allocator "
        "keeps it until that stream's work is done."
    ),
}
MEMORY = {
    "allocated": "Bytes of tensors, as torch.cuda.memory_allocated() counts them.",
    "reserved": (
        "Bytes that the allocator has taken from the GPU, in use or free, as "
        "torch.cuda.memory_reserved() counts them. The dark line shows them."
    ),
    "blocks": "Each block of memory from its allocation to its free, at its place in the memory.",
}
