"""Wrong answers to the exercises of lesson 06: for each, what a learner may well write, and a part of what the check says."""

import inspect
from types import FunctionType

from labkit.checks import leaky_scripts as scripts


def source(script: FunctionType) -> str:
    """A script as it is handed out."""
    return inspect.getsource(script).replace(": Any", "").replace(" -> Any", "")


def changed(text: str, *changes: tuple[str, str]) -> str:
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return text


VALIDATE, COLLECT, SMOOTHED, WATCHED, ROBUSTLY = map(
    source, (scripts.train_and_validate, scripts.train_and_collect, scripts.train_smoothed, scripts.train_watched, scripts.train_robustly)
)

# Each script's leaking line, and what it becomes when it is mended.
ERROR = "        error += nn.functional.l1_loss(model(x), y)\n"
ERROR_ITEM = "        error += nn.functional.l1_loss(model(x), y).item()\n"
OUTPUT = "        outputs.append(output.detach())\n"
HOOK = "model[1].register_forward_hook(lambda module, inputs, output: seen.append(output))\n"
ONE_HOOK = "seen, means = [], []\n    handle = " + HOOK.replace("seen.append(output)", "means.append(output.mean().item())")
STEP = "        loss.backward()\n        optimizer.step()\n"

MENDED_VALIDATE = changed(VALIDATE, (ERROR, ERROR_ITEM), ("(error / steps).item()", "error / steps"))
MENDED_COLLECT = changed(COLLECT, ("output.detach()", "output.detach().cpu()"), ("torch.cat(outputs).cpu()", "torch.cat(outputs)"))
MENDED_SMOOTHED = changed(
    SMOOTHED, ("retain_graph=True", ""), ("0.1 * loss", "0.1 * loss.item()"), ("[value.item() for value in curve]", "curve")
)
MENDED_WATCHED = changed(
    WATCHED,
    ("        " + HOOK, ""),
    ("seen, means = [], []\n", ONE_HOOK),
    ("        means.append(seen[-1].mean().item())\n", ""),
    ("return means", "handle.remove()\n    return means"),
)
MENDED_ROBUSTLY = changed(ROBUSTLY, ("errors.append(error)", "errors.append(str(error))"))

MORE, OTHER = "more after 6 more steps", "must return what the script returned"
KEEPS, WHERE, KNOWS = "What does the hook keep", "Where are the tensors", "What does an exception know"

WRONG = {
    "06.1": {
        "names deleted": (changed(VALIDATE, (ERROR, ERROR + "        del x, y, loss\n")), MORE),
        "evaluation mode": (changed(VALIDATE, (ERROR, "        model.eval()\n" + ERROR + "        model.train()\n")), MORE),
        "errors without a graph in a list": (
            changed(
                VALIDATE,
                ("error, steps = 0, 0", "errors, steps = [], 0"),
                (ERROR, "        errors.append(nn.functional.l1_loss(model(x), y).detach())\n"),
                ("(error / steps)", "torch.stack(errors).mean()"),
            ),
            "3 KiB more",
        ),
        "asked before the step": (changed(MENDED_VALIDATE, (ERROR_ITEM, ""), (STEP, ERROR_ITEM + STEP)), OTHER),
        "only the last error": (changed(MENDED_VALIDATE, ("error += nn", "error = nn"), ("error / steps", "error")), OTHER),
        "no training": (changed(MENDED_VALIDATE, (STEP, "")), OTHER),
        "a tensor returned": (changed(MENDED_VALIDATE, ("error / steps", "torch.tensor(error / steps)")), "yours returned a tensor"),
    },
    "06.2": {
        "under no_grad": (changed(COLLECT, (OUTPUT, "        with torch.no_grad():\n    " + OUTPUT)), WHERE),
        "joined each time": (changed(COLLECT, (OUTPUT, "        outputs = [torch.cat([*outputs, output.detach()])]\n")), WHERE),
        "only the last": (changed(COLLECT, ("outputs.append(output.detach())", "outputs = [output.detach()]")), OTHER),
        "back on the GPU": (changed(MENDED_COLLECT, ("torch.cat(outputs)", "torch.cat(outputs).cuda()")), "on cuda"),
        "asked again after the step": (changed(MENDED_COLLECT, ("output.detach()", "model(x).detach()")), OTHER),
    },
    "06.3": {
        "the curve as numbers": (
            changed(SMOOTHED, ("append(average)", "append(average.item())"), ("[value.item() for value in curve]", "curve")),
            "What does the average remember",
        ),
        "the average detached": (changed(SMOOTHED, ("0.1 * loss", "0.1 * loss.detach()"), ("retain_graph=True", "")), "3 KiB more"),
        "no smoothing": (changed(MENDED_SMOOTHED, ("0.9 * average + 0.1 * loss.item()", "loss.item()")), OTHER),
        "a sum": (changed(MENDED_SMOOTHED, ("0.9 * average", "average")), OTHER),
        "no training": (changed(MENDED_SMOOTHED, ("        optimizer.step()\n", "")), OTHER),
    },
    "06.4": {
        "outputs detached": (changed(WATCHED, ("seen.append(output)", "seen.append(output.detach())")), KEEPS),
        "a hook each step, of numbers": (
            changed(WATCHED, ("seen.append(output)", "seen.append(output.mean().item())"), ("seen[-1].mean().item()", "seen[-1]")),
            "left 12 hook",
        ),
        "the hook stays": (changed(MENDED_WATCHED, ("    handle.remove()\n", "")), "left 1 hook"),
        "means left on the GPU": (
            changed(MENDED_WATCHED, ("mean().item()", "mean().detach()"), ("return means", "return [mean.item() for mean in means]")),
            "3 KiB more",
        ),
        "the output layer": (changed(MENDED_WATCHED, ("= model[1]", "= model[2]")), OTHER),
        "nothing watched": (changed(MENDED_WATCHED, ("return means", "return [0.0] * len(means)")), OTHER),
    },
    "06.5": {
        "errors passed over": (changed(MENDED_ROBUSTLY, ("errors.append(str(error))", "pass")), OTHER),
        "names deleted": (changed(ROBUSTLY, ("append(error)", "append(error)\n            del x, y")), KNOWS),
        "errors in a tuple": (
            changed(ROBUSTLY, ("append(error)", "append((number, error))"), ("for error in errors", "for number, error in errors")),
            KNOWS,
        ),
        "not caught": (changed(MENDED_ROBUSTLY, ("except ValueError", "except KeyError")), "ValueError: batch"),
        "trained on bad batches": (changed(MENDED_ROBUSTLY, ("loss.isnan()", "False")), OTHER),
        "stopped at the first": (changed(MENDED_ROBUSTLY, ("str(error))", "str(error))\n            break")), "did not ask for more"),
    },
}  # fmt: skip
