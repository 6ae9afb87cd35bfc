"""Results recorded on real GPUs, which ship with the kit: one JSON file for an experiment and a GPU model."""

from importlib import resources

from labkit.experiments.result import Result


def load(name: str, gpu: str = "H200") -> Result | None:
    """What the experiment `name` gave on a real GPU of that model; None if it was not recorded there."""
    file = resources.files(__package__) / f"{name}_{gpu.lower()}.json"
    return Result.from_json(file.read_text(encoding="utf-8")) if file.is_file() else None


def names() -> list[str]:
    """The recordings there are, such as "copy_speed_h200"."""
    return sorted(file.name.removesuffix(".json") for file in resources.files(__package__).iterdir() if file.name.endswith(".json"))
