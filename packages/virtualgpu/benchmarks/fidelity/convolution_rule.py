"""Build the rule for cuDNN's workspaces from a recording, and print how far off it is.

usage: convolution_rule.py [--write]      (needs scikit-learn)

The recording is h100/convolution_sweep.npz, made by convolution_sweep.py. Two thirds of it build the
trees of virtualgpu/profiles/cudnn_convolution_rule.json. The errors are those on the other third.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER.parents[1] / "src"
sys.path.insert(0, str(SOURCE))

from virtualgpu.ops.nn import convolution_workspaces as module  # noqa: E402

SWEEP = FOLDER / "h100" / "convolution_sweep.npz"
PROFILE = SOURCE / "virtualgpu" / "profiles" / "cudnn_convolution_rule.json"
MIB = 1 << 20
TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (128, 256), (256, 128), (64, 256), (256, 64))
PAIRS = ((128, 128), (128, 256), (64, 128), (128, 64), (64, 256))
WEIGHTS = (*range(1, 41), 43, 44, 46, 48, 52, 56, 60, 64, 66, 72, 80, 88, 96, 112, 120, 124, 127, 128)
FEW_WEIGHTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
MOST_FORMULAS = 110
ROUNDS = 3  # of choosing, among the formulas that fit a convolution, the one that its leaf prefers
COARSE, FINE = 20, 8  # convolutions in a leaf: while formulas are chosen, and at the end


def formulas(result):
    """Return the formulas that a tree may choose from."""
    found = [module.Formula()]
    for multiple in (1, 4, 8, 16, 32, 64):
        names = ("XYW",) if multiple in (16, 64) else ("XYW", "XY", "XW", "YW", "X", "Y", "W")
        found += [module.Formula(copies, multiple) for copies in names]
    found += [module.Formula(copies, by_group=True) for copies in ("XYW", "XY")]
    found += [module.Formula("XYW", multiple, wide=True) for multiple in (1, 0)]
    found.append(module.Formula("XY", wide=True))
    for side, tiles in ((1, TILES), (2, PAIRS)):
        for tile in tiles:
            shared = (*tile, side)
            found += [module.Formula(tile=shared), module.Formula("XYW", 0, tile=shared)]
            if side == 1:
                found.append(module.Formula("XYW", 64, tile=shared))
    for mebibytes in (1.5, 3, 5, 7, 9, 12, 15):
        fixed = int(mebibytes * MIB)
        found += [module.Formula(fixed=fixed), module.Formula("XYW", 0, fixed=fixed)]
    if result == module.WEIGHT_GRADIENT:
        found.append(module.Formula(each_sample=True))
        found += [module.Formula("XYW", 0, weights=count) for count in WEIGHTS]
        for count in FEW_WEIGHTS:
            found += [module.Formula(multiple=multiple, weights=count) for multiple in (0, 1)]
            found.append(module.Formula("XY", weights=count))
    else:
        for count in (1, 2, 3, 4, 6, 8, 16):
            found += [module.Formula("XYW", multiple, outputs=count) for multiple in (0, 1)]
            found.append(module.Formula(outputs=count))
    return found


def read(path=SWEEP):
    """Return the recorded convolutions, one array a field, the bytes, and which are held back."""
    recording = np.load(path)
    columns = recording["convolutions"].astype(np.int64).T
    triples = [list(columns[start : start + 3]) for start in range(8, 26, 3)]
    convolution = module.Convolution(*columns[:8], *triples)
    return convolution, recording["bytes"].astype(np.int64), recording["held_back"]


def close(found, true, least, share):
    """Tell which predictions are within so many bytes or such a share of the truth."""
    return np.abs(found - true) <= np.maximum(least, share * true)


def choose(found, true):
    """Return the columns of as few formulas as explain most convolutions, the commonest first."""
    fits = close(found, true[:, None], MIB // 2, 0.005)
    left, chosen = np.ones(len(true), bool), []
    while left.any() and len(chosen) < MOST_FORMULAS:
        counts = fits[left].sum(0)
        best = int(counts.argmax())
        if counts[best] < len(true) * 1e-4:
            break
        chosen.append(best)
        left &= ~fits[:, best]
    return chosen


def build(numbers, found, true):
    """Return a tree, and the columns of the formulas that its classes stand for."""
    from sklearn.tree import DecisionTreeClassifier

    chosen = choose(found, true)
    fits = close(found[:, chosen], true[:, None], MIB // 2, 0.005)
    nearly = close(found[:, chosen], true[:, None], 2 * MIB, 0.02)
    usable = np.where(fits.any(1)[:, None], fits, nearly)
    labels = usable.argmax(1)
    for _ in range(ROUNDS):
        tree = DecisionTreeClassifier(min_samples_leaf=COARSE, random_state=0).fit(numbers, labels)
        liked = np.full((len(labels), len(chosen)), -1.0, np.float32)
        liked[:, tree.classes_] = tree.predict_proba(numbers)
        liked[~usable] = -1
        labels = np.where(usable.any(1), liked.argmax(1), labels)
    tree = DecisionTreeClassifier(min_samples_leaf=FINE, random_state=0).fit(numbers, labels)
    return tree, [chosen[label] for label in tree.classes_]


def in_preorder(tree):
    """Return the lists of `convolution_workspaces.Tree`. Leaves of one formula are joined."""
    inner = tree.tree_
    question, threshold, right = [], [], []

    def leaf(label):
        question.append(module.LEAF)
        threshold.append(0)
        right.append(label)

    def one_label(node):
        if inner.children_left[node] == -1:
            return int(inner.value[node][0].argmax())
        labels = {one_label(inner.children_left[node]), one_label(inner.children_right[node])}
        return labels.pop() if len(labels) == 1 else None

    def add(node):
        label = one_label(node)
        if label is not None:
            return leaf(label)
        place = len(question)
        question.append(int(inner.feature[node]))
        threshold.append(float(f"{inner.threshold[node]:.7g}"))
        right.append(0)
        add(inner.children_left[node])
        right[place] = len(question)
        add(inner.children_right[node])

    sys.setrecursionlimit(10_000)
    add(0)
    return question, threshold, right


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write the profile")
    options = parser.parse_args()
    convolution, true, held_back = read()
    x, y, w = convolution.copies(1)
    entries = []
    for result, (name, written) in enumerate((("output", y), ("input's gradient", x), ("weight's gradient", w))):
        named = module.features(convolution, result)
        numbers = np.stack([np.broadcast_to(np.asarray(n, np.float32), held_back.shape) for n in named.values()], 1)
        known = formulas(result)
        found = np.stack([np.broadcast_to(f.bytes(convolution, result), held_back.shape) for f in known], 1)
        tree, columns = build(numbers[~held_back], found[~held_back], true[~held_back, result])
        predicted = found[held_back][np.arange(held_back.sum()), np.array(columns)[np.searchsorted(tree.classes_, tree.predict(numbers[held_back]))]]
        asked = true[held_back, result]
        good = close(predicted, asked, 2 * MIB, 0.02)
        of_peak = np.abs(predicted - asked) <= np.maximum(2 * MIB, 0.02 * (asked + written[held_back]))
        question, threshold, right = in_preorder(tree)
        print(f"{name}: {len(asked):,} held back, {good.mean():.1%} within 2 MiB or 2%, {of_peak.mean():.1%} of the peak; {len(columns)} formulas, {question.count(module.LEAF):,} leaves")
        fields = [{key: value for key, value in known[column]._asdict().items() if value != module.Formula._field_defaults[key]} for column in columns]
        entries.append({"formulas": fields, "tree": [question, threshold, right], "held_back": len(asked), "within_2_mib_or_2_percent": round(float(good.mean()), 4)})
    if options.write:
        source = "cuDNN 9.19 (PyTorch 2.11, CUDA 13.0) on one NVIDIA H100, 26 November 2026. Built by benchmarks/fidelity/convolution_rule.py from two thirds of h100/convolution_sweep.npz"
        text = json.dumps({"source": source, "features": list(named), "results": entries}, separators=(",", ":"))
        PROFILE.write_text(text.replace(',{"formulas"', ',\n{"formulas"') + "\n")


if __name__ == "__main__":
    main()
