"""More wrong and right answers to the exercises of lesson 06."""

import runpy
from pathlib import Path

FIRST = runpy.run_path(str(Path(__file__).with_name("answers.py")))
changed = FIRST["changed"]
VALIDATE, COLLECT, SMOOTHED, WATCHED, ROBUSTLY = (
    FIRST[name] for name in ("VALIDATE", "COLLECT", "SMOOTHED", "WATCHED", "ROBUSTLY")
)
MENDED_VALIDATE, MENDED_COLLECT, MENDED_SMOOTHED, MENDED_WATCHED, MENDED_ROBUSTLY = (
    FIRST[f"MENDED_{name}"] for name in ("VALIDATE", "COLLECT", "SMOOTHED", "WATCHED", "ROBUSTLY")
)
ERROR, ERROR_ITEM, OUTPUT, STEP = (
    FIRST[name] for name in ("ERROR", "ERROR_ITEM", "OUTPUT", "STEP")
)
MORE, OTHER, KEEPS, WHERE = (FIRST[name] for name in ("MORE", "OTHER", "KEEPS", "WHERE"))
SEVERAL = "What does a loss keep"

NO_GRAPH = "        model.requires_grad_(False)\n" + ERROR + "        model.requires_grad_(True)\n"
LOOP = "    for number, (x, y) in enumerate(batches):\n"
REGISTER = "    handle = model[1].register_forward_hook("
NOTE = "lambda module, inputs, output: means.append(output.mean().item())"

WRONG = {
    "06.1": {
        "errors on the CPU, with graphs": (changed(VALIDATE, ("model(x), y)\n        steps", "model(x), y).cpu()\n        steps")), MORE),
        "the training loss": (changed(MENDED_VALIDATE, (ERROR_ITEM, "        error += loss.item()\n")), OTHER),
        "one step too many": (changed(MENDED_VALIDATE, ("error / steps", "error / (steps + 1)")), OTHER),
        "another error": (changed(MENDED_VALIDATE, ("l1_loss", "mse_loss")), OTHER),
        "no_grad around everything": (
            changed(MENDED_VALIDATE, ("    for x, y in batches:\n", "    torch.set_grad_enabled(False)\n    for x, y in batches:\n")),
            "does not require grad",
        ),
        "detached once": (
            changed(VALIDATE, ("        steps += 1\n", "        steps += 1\n        error = error.detach() if steps == 6 else error\n")),
            "than after the first step",
        ),
    },
    "06.2": {
        "moved to the same GPU": (changed(COLLECT, ("output.detach()", "output.detach().to('cuda')")), WHERE),
        "a slice": (changed(COLLECT, ("output.detach()", "output[:].detach()")), WHERE),
        "one row of each batch": (changed(MENDED_COLLECT, ("output.detach()", "output[:1].detach()")), OTHER),
        "in double precision": (changed(MENDED_COLLECT, ("output.detach()", "output.detach().double()")), OTHER),
        "outputs shifted": (changed(MENDED_COLLECT, ("torch.cat(outputs)", "torch.cat(outputs[1:] + outputs[:1])")), OTHER),
        "targets collected": (changed(MENDED_COLLECT, ("output.detach()", "y.detach()")), OTHER),
    },
    "06.3": {
        "the loss deleted": (
            changed(SMOOTHED, ("curve.append(average)\n", "curve.append(average)\n        del loss\n")),
            "What does the average remember",
        ),
        "detached at each step": (
            changed(
                SMOOTHED,
                ("retain_graph=True", ""),
                ("0.9 * average + 0.1 * loss", "(0.9 * average + 0.1 * loss).detach()"),
            ),
            "KiB more",
        ),
        "the curve on the CPU, with graphs": (
            changed(SMOOTHED, ("retain_graph=True", ""), ("curve.append(average)", "curve.append(average.cpu())")),
            "in the computer's memory",
        ),
        "starts with the first loss": (
            changed(
                MENDED_SMOOTHED,
                ("average = 0.9 * average + 0.1 * loss.item()", "average = 0.9 * (average or loss.item()) + 0.1 * loss.item()"),
            ),
            OTHER,
        ),
        "the graph retained at first": (
            changed(MENDED_SMOOTHED, ("loss.backward()", "loss.backward(retain_graph=not curve)")),
            "Which argument",
        ),
    },
    "06.4": {
        "the hook removed after one step": (
            changed(MENDED_WATCHED, ("        optimizer.step()\n", "        optimizer.step()\n        handle.remove()\n")),
            OTHER,
        ),
        "outputs kept, hook removed": (
            changed(
                MENDED_WATCHED,
                ("means.append(output.mean().item())", "means.append(output.detach())"),
                ("return means", "return [output.mean().item() for output in means]"),
            ),
            KEEPS,
        ),
        "the largest activation": (changed(MENDED_WATCHED, ("output.mean()", "output.max()")), OTHER),
        "the sum": (changed(MENDED_WATCHED, ("output.mean()", "output.sum()")), OTHER),
        "a hook that changes the output": (
            changed(MENDED_WATCHED, ("means.append(output.mean().item()))", "(means.append(output.mean().item()), output.detach())[1])")),
            "has not learned|must return",
        ),
    },
    "06.5": {
        "only the losses fixed": (
            changed(ROBUSTLY, ("return loss\n", "return loss.item()\n"), ("[loss.item() for loss in losses]", "losses")),
            SEVERAL,
        ),
        "only the errors fixed": (
            changed(ROBUSTLY, ("errors.append(error)", "errors.append(str(error))"), ("[str(error) for error in errors]", "errors")),
            SEVERAL,
        ),
        "the hook stays": (changed(MENDED_ROBUSTLY, ("    handle.remove()\n", "")), "left 1 hook"),
        "losses detached": (
            changed(
                MENDED_ROBUSTLY,
                ("return loss.item()\n", "return loss.detach()\n"),
                ("return losses, seen", "return [loss.item() for loss in losses], seen"),
            ),
            SEVERAL,
        ),
        "means of good batches": (
            changed(
                MENDED_ROBUSTLY,
                ("            errors.append", "            seen.pop()\n            errors.append"),
            ),
            OTHER,
        ),
        "bad batches have a loss": (
            changed(MENDED_ROBUSTLY, ("            errors.append", "            losses.append(0.0)\n            errors.append")),
            OTHER,
        ),
        "means as tensors": (
            changed(
                MENDED_ROBUSTLY,
                ("output.mean().item()", "output.mean()"),
                ("return losses, seen", "return losses, [mean.item() for mean in seen]"),
            ),
            SEVERAL,
        ),
    },
}  # fmt: skip

RIGHT = {
    "06.1": {
        "parameters without gradients": changed(VALIDATE, (ERROR, NO_GRAPH)),
        "a float": changed(
            VALIDATE,
            (ERROR, "        error += float(nn.functional.l1_loss(model(x), y))\n"),
            ("(error / steps).item()", "error / steps"),
        ),
        "a decorated function": changed(
            VALIDATE,
            (
                "    error, steps = 0, 0\n",
                "    @torch.no_grad()\n    def now(x, y):\n        return nn.functional.l1_loss(model(x), y)\n\n    error, steps = 0, 0\n",
            ),
            (ERROR, "        error += now(x, y)\n"),
        ),
    },
    "06.2": {
        "joined on the CPU each time": changed(
            COLLECT,
            ("    outputs = []\n", "    outputs = torch.empty(0)\n"),
            (OUTPUT, "        part = output.detach().cpu()\n        outputs = torch.cat([outputs, part]) if len(outputs) else part\n"),
            ("torch.cat(outputs).cpu()", "outputs"),
        ),
        "cpu and then detach": changed(MENDED_COLLECT, ("output.detach().cpu()", "output.cpu().detach()")),
    },
    "06.3": {
        "a float of the loss": changed(MENDED_SMOOTHED, ("loss.item()", "float(loss)")),
        "smoothed by accumulate": changed(
            MENDED_SMOOTHED,
            ("        average = 0.9 * average + 0.1 * loss.item()\n        curve.append(average)\n", "        curve.append(loss.item())\n"),
            (
                "    return curve",
                "    from itertools import accumulate\n"
                "    return list(accumulate(curve, lambda old, new: 0.9 * old + 0.1 * new, initial=0))[1:]",
            ),
        ),
    },
    "06.4": {
        "a named hook": changed(
            MENDED_WATCHED,
            (
                REGISTER + NOTE + ")\n",
                "    def note(module, inputs, output):\n        means.append(float(output.detach().mean()))\n\n" + REGISTER + "note)\n",
            ),
        ),
    },
    "06.5": {
        "the hook removed in finally": changed(
            MENDED_ROBUSTLY,
            (LOOP, "    try:\n      for number, (x, y) in enumerate(batches):\n"),
            ("    handle.remove()\n", "    finally:\n        handle.remove()\n"),
            ("        try:\n            losses", "        try:\n            losses"),
        ),
        "formatted errors": changed(MENDED_ROBUSTLY, ("errors.append(str(error))", "errors.append(f'{error}')")),
        "the traceback dropped": changed(
            MENDED_ROBUSTLY,
            ("errors.append(str(error))", "error.__traceback__ = None\n            errors.append(error)"),
            ("return losses, seen, errors", "return losses, seen, [str(error) for error in errors]"),
        ),
    },
}  # fmt: skip
