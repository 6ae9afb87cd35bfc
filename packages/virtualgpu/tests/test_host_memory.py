"""The memory that a process may use on a machine of its own and in a container."""

from pathlib import Path

from virtualgpu.host_memory import container_memory, host_memory

GIB = 1 << 30


def control_group(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_of_a_container(tmp_path):
    stat = "anon 5\ninactive_file 100\nactive_file 7\n"
    root = control_group(
        tmp_path, {"memory.max": f"{GIB}\n", "memory.current": "1100\n", "memory.stat": stat}
    )
    assert container_memory(root) == (GIB, 1000)
    memory, available, limited = host_memory(root)
    assert (memory, limited) == (GIB, True) and 0 < available <= GIB - 1000


def test_memory_of_an_older_container(tmp_path):
    stat = "cache 5\ninactive_file 3\ntotal_inactive_file 100\n"
    files = {
        "memory/memory.limit_in_bytes": "2000",
        "memory/memory.usage_in_bytes": "1100",
        "memory/memory.stat": stat,
    }
    assert container_memory(control_group(tmp_path, files)) == (2000, 1000)


def test_memory_without_a_limit(tmp_path):
    assert container_memory(tmp_path) == (None, 0)
    root = control_group(tmp_path, {"memory.max": "max", "memory.current": "10", "memory.stat": ""})
    assert container_memory(root) == (None, 10)
    memory, available, limited = host_memory(root)
    assert not limited and 0 < available <= memory


def test_memory_of_a_job_within_a_machine(tmp_path):
    """Check a batch job, whose group of processes is limited, and which sees the outer groups."""
    files = {"memory.max": "max", "memory.current": "9000", "memory.stat": ""}
    files |= {
        f"jobs.slice/{name}": text
        for name, text in {
            "memory.max": "5000",
            "memory.current": "3000",
            "memory.stat": "",
        }.items()
    }
    files |= {
        f"jobs.slice/mine/{name}": text
        for name, text in {"memory.max": "4000", "memory.current": "500", "memory.stat": ""}.items()
    }
    root = control_group(tmp_path, files)
    assert container_memory(root) == (None, 9000)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/jobs.slice/mine/kernel\n")
    # the other jobs leave less than this job's own limit
    assert container_memory(root) == (
        5000,
        3000,
    )


def test_memory_of_an_older_job(tmp_path):
    files = {"memory.limit_in_bytes": str(1 << 62), "memory.usage_in_bytes": "9", "memory.stat": ""}
    own = {
        "memory.limit_in_bytes": "4000",
        "memory.usage_in_bytes": "1000",
        "memory.stat": "total_inactive_file 300\n",
    }
    everywhere = {f"memory/{name}": text for name, text in files.items()}
    root = control_group(
        tmp_path, everywhere | {f"memory/slurm/job_7/{name}": text for name, text in own.items()}
    )
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(
        "5:cpu,cpuacct:/\n4:memory:/slurm/job_7\n0::/elsewhere\n"
    )
    assert container_memory(root) == (4000, 700)
