"""Run allocator workloads, each in a fresh process, and write what the caching allocator reported at every checkpoint.

usage: python harness.py MODULE OUT.json [NAME ...]
A workload is a function w_NAME(cp) in MODULE; it calls cp("label") where the allocator's state is to be read.
"""

import importlib, json, subprocess, sys, concurrent.futures as cf


def state(torch):
    rows = []
    for d in range(torch.cuda.device_count()):
        s = torch.cuda.memory_stats(d)
        rows.append(
            {
                "allocated": torch.cuda.memory_allocated(d),
                "reserved": torch.cuda.memory_reserved(d),
                "peak_allocated": torch.cuda.max_memory_allocated(d),
                "peak_reserved": torch.cuda.max_memory_reserved(d),
                "active_blocks": s.get("active.all.current", 0),
                "segments": s.get("segment.all.current", 0),
                "inactive_split": s.get("inactive_split_bytes.all.current", 0),
                "requested": s.get("requested_bytes.all.current", 0),
                "num_alloc_retries": s.get("num_alloc_retries", 0),
                "num_ooms": s.get("num_ooms", 0),
            }
        )
    return rows


def one(module, name):
    import torch

    torch.manual_seed(0)
    points = []

    def cp(label, **extra):
        torch.cuda.synchronize()
        points.append({"label": label, "devices": state(torch), **extra})

    try:
        getattr(importlib.import_module(module), "w_" + name)(cp)
        err = None
    except Exception as e:
        import traceback

        err = traceback.format_exc()[-1500:]
    print("RESULT " + json.dumps({"points": points, "error": err}))


def main():
    module, out, *names = sys.argv[1:]
    names = names or [n[2:] for n in dir(importlib.import_module(module)) if n.startswith("w_")]

    def run(n):
        p = subprocess.run([sys.executable, __file__, "--one", module, n], capture_output=True, text=True, timeout=300)
        for line in p.stdout.splitlines():
            if line.startswith("RESULT "):
                return n, json.loads(line[7:])
        return n, {"points": [], "error": (p.stderr or p.stdout)[-1500:]}

    with cf.ThreadPoolExecutor(6) as ex:
        res = dict(ex.map(run, names))
    import torch

    p = torch.cuda.get_device_properties(0)
    json.dump(
        {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": p.name,
            "total_memory": p.total_memory,
            "device_count": torch.cuda.device_count(),
            "workloads": res,
        },
        open(out, "w"),
        indent=1,
    )
    for n, r in res.items():
        print(n, len(r["points"]), "ERROR " + r["error"].strip().splitlines()[-1][:160] if r["error"] else "ok")


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one(sys.argv[2], sys.argv[3])
    else:
        main()
