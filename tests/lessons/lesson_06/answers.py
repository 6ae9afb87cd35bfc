"""Wrong answers to the exercises of lesson 06: for each, what a learner may well write, and a part of what the check says."""

import inspect
from types import FunctionType

from gpulessons.lesson_06 import leaky_scripts as scripts


def source(script: FunctionType) -> str:
    """A script as it is handed out."""
    return inspect.getsource(script).replace(": Any", "").replace(" -> Any", "")


def changed(text: str, *changes: tuple[str, str]) -> str:
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return text


VALIDATE, COLLECT, SMOOTHED, WATCHED, ROBUSTLY = map(
    source,
    (
        scripts.train_and_validate,
        scripts.train_and_collect,
        scripts.train_smoothed,
        scripts.train_watched,
        scripts.train_robustly,
    ),
)

# Each script's leaking line, and what it becomes when it is mended.
ERROR = "        error += nn.functional.l1_loss(model(x), y)\n"
ERROR_ITEM = "        error += nn.functional.l1_loss(model(x), y).item()\n"
OUTPUT = "        outputs.append(output.detach())\n"
HOOK = "model[1].register_forward_hook(lambda module, inputs, output: seen.append(output))\n"
ONE_HOOK = "seen, means = [], []\n    handle = " + HOOK.replace(
    "seen.append(output)", "means.append(output.mean().item())"
)
STEP = "        loss.backward()\n        optimizer.step()\n"

MENDED_VALIDATE = changed(
    VALIDATE, (ERROR, ERROR_ITEM), ("(error / steps).item()", "error / steps")
)
MENDED_COLLECT = changed(
    COLLECT,
    ("output.detach()", "output.detach().cpu()"),
    ("torch.cat(outputs).cpu()", "torch.cat(outputs)"),
)
MENDED_SMOOTHED = changed(
    SMOOTHED,
    ("retain_graph=True", ""),
    ("0.1 * loss", "0.1 * loss.item()"),
    ("[value.item() for value in curve]", "curve"),
)
MENDED_WATCHED = changed(
    WATCHED,
    ("        " + HOOK, ""),
    ("seen, means = [], []\n", ONE_HOOK),
    ("        means.append(seen[-1].mean().item())\n", ""),
    ("return means", "handle.remove()\n    return means"),
)
# The last script with one leak left, that of the errors, and without leaks.
ONLY_ERRORS = changed(
    ROBUSTLY,
    ("return loss\n", "return loss.item()\n"),
    ("[loss.item() for loss in losses], means", "losses, seen"),
    ("    means = [output.mean().item() for output in seen]\n", "    handle.remove()\n"),
    ("    model[1].register", "    handle = model[1].register"),
    ("seen.append(output)", "seen.append(output.mean().item())"),
)
MENDED_ROBUSTLY = changed(
    ONLY_ERRORS,
    ("errors.append(error)", "errors.append(str(error))"),
    ("[str(error) for error in errors]", "errors"),
)

MORE, OTHER = "more after 6 more steps", "must return what the script returned"
KEEPS, WHERE, KNOWS = (
    "What does the hook keep",
    "Where are the tensors",
    "what does an exception know",
)

WRONG = {
    "06.1": {
        "names deleted": (changed(VALIDATE, (ERROR, ERROR + "        del x, y, loss\n")), MORE),
        "evaluation mode": (changed(VALIDATE, (ERROR, "        model.eval()\n" + ERROR + "        model.train()\n")), MORE),
        "evaluation mode for good": (changed(MENDED_VALIDATE, (ERROR_ITEM, "        model.eval()\n" + ERROR_ITEM)), "another mode"),
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
        "the sum detached at the end": (changed(VALIDATE, ("(error / steps).item()", "(error / steps).detach().item()")), MORE),
        "the graph kept with backward": (changed(MENDED_VALIDATE, ("loss.backward()", "loss.backward(retain_graph=True)")), "Which argument"),
        "a deleted loss": (changed(VALIDATE, (ERROR, ERROR + "        del loss\n")), MORE),
        "the sum detached now and then": (
            changed(VALIDATE, ("        steps += 1\n", "        steps += 1\n        error = error if steps % 10 else error.detach()\n")),
            "than after the first step",
        ),
        "the sum detached at every third step": (
            changed(
                VALIDATE,
                ("        steps += 1\n", "        steps += 1\n        if steps % 3 == 0:\n            error = error.detach()\n"),
            ),
            "than after the first step",
        ),
        "backward only to free the graph": (
            changed(
                VALIDATE,
                (ERROR, "        wrong = nn.functional.l1_loss(model(x), y)\n        wrong.backward()\n        error += wrong.item()\n"),
                ("(error / steps).item()", "error / steps"),
            ),
            "ran 24 backward passes, the script 12",
        ),
        "backward only to free the graph, and its gradients cleared": (
            changed(
                VALIDATE,
                (ERROR, "        wrong = nn.functional.l1_loss(model(x), y)\n        wrong.backward()\n        error += wrong.item()\n"),
                ("(error / steps).item()", "error / steps"),
                ("        steps += 1\n", "        steps += 1\n        optimizer.zero_grad()\n"),
            ),
            "ran 24 backward passes, the script 12",
        ),
        "a tensor returned": (changed(MENDED_VALIDATE, ("error / steps", "torch.tensor(error / steps)")), "Yours returned a tensor"),
    },
    "06.2": {
        "under no_grad": (changed(COLLECT, (OUTPUT, "        with torch.no_grad():\n    " + OUTPUT)), WHERE),
        "joined each time": (changed(COLLECT, (OUTPUT, "        outputs = [torch.cat([*outputs, output.detach()])]\n")), WHERE),
        "only the last": (changed(COLLECT, ("outputs.append(output.detach())", "outputs = [output.detach()]")), OTHER),
        "back on the GPU": (changed(MENDED_COLLECT, ("torch.cat(outputs)", "torch.cat(outputs).cuda()")), "on cuda"),
        "with its graph, on the CPU": (changed(MENDED_COLLECT, ("output.detach().cpu()", "output.cpu()")), "with a graph"),
        "its graph dropped at the end": (
            changed(MENDED_COLLECT, ("output.detach().cpu()", "output.cpu()"), ("cat(outputs)", "cat(outputs).detach()")),
            "in the computer's memory",
        ),
        "batches kept too": (
            changed(MENDED_COLLECT, ("outputs = []", "outputs, seen = [], []"), ("        optimizer.step()\n", "        optimizer.step()\n        seen.append(x)\n")),
            WHERE,
        ),
        "rows upside down": (changed(MENDED_COLLECT, ("torch.cat(outputs)", "torch.cat(outputs[::-1])")), OTHER),
        "the graph kept with backward": (changed(MENDED_COLLECT, (".backward()", ".backward(retain_graph=True)")), "Which argument"),
        "to the CPU in groups": (
            changed(
                COLLECT,
                (OUTPUT, OUTPUT + "        outputs = outputs if len(outputs) % 6 else [output.cpu() for output in outputs]\n"),
                ("torch.cat(outputs).cpu()", "torch.cat([output.cpu() for output in outputs])"),
            ),
            "than after the first step",
        ),
        "to the CPU at every third step": (
            changed(
                COLLECT,
                (OUTPUT, OUTPUT + "        if len(outputs) % 3 == 0:\n            outputs = [output.cpu() for output in outputs]\n"),
                ("torch.cat(outputs).cpu()", "torch.cat([output.cpu() for output in outputs])"),
            ),
            "than after the first step",
        ),
        "in half precision": (
            changed(MENDED_COLLECT, ("output.detach()", "output.detach().half()"), ("torch.cat(outputs)", "torch.cat(outputs).float()")),
            OTHER,
        ),
        "a list returned": (changed(MENDED_COLLECT, ("torch.cat(outputs)", "outputs")), OTHER),
        "asked again after the step": (changed(MENDED_COLLECT, ("output.detach()", "model(x).detach()")), OTHER),
    },
    "06.3": {
        "the curve as numbers": (
            changed(SMOOTHED, ("append(average)", "append(average.item())"), ("[value.item() for value in curve]", "curve")),
            "What does the average remember",
        ),
        "the average detached": (changed(SMOOTHED, ("0.1 * loss", "0.1 * loss.detach()"), ("retain_graph=True", "")), "3 KiB more"),
        "the graph still retained": (
            changed(SMOOTHED, ("0.1 * loss", "0.1 * loss.item()"), ("[value.item() for value in curve]", "curve")),
            "Which argument",
        ),
        "averages without gradients on the GPU": (
            changed(SMOOTHED, ("retain_graph=True", ""), ("        average = ", "        with torch.no_grad():\n            average = ")),
            "3 KiB more",
        ),
        "losses on the CPU, with their graphs": (
            changed(SMOOTHED, ("retain_graph=True", ""), ("0.1 * loss", "0.1 * loss.cpu()")),
            "in the computer's memory",
        ),
        "the average detached at every third step": (
            changed(
                SMOOTHED,
                ("retain_graph=True", ""),
                ("append(average)", "append(average.item())\n        if len(curve) % 3 == 0:\n            average = average.detach()"),
                ("[value.item() for value in curve]", "curve"),
            ),
            "in the computer's memory",
        ),
        "old and new change places": (changed(MENDED_SMOOTHED, ("0.9 * average + 0.1", "0.1 * average + 0.9")), OTHER),
        "no smoothing": (changed(MENDED_SMOOTHED, ("0.9 * average + 0.1 * loss.item()", "loss.item()")), OTHER),
        "a sum": (changed(MENDED_SMOOTHED, ("0.9 * average", "average")), OTHER),
        "no training": (changed(MENDED_SMOOTHED, ("        optimizer.step()\n", "")), OTHER),
    },
    "06.4": {
        "outputs detached": (changed(WATCHED, ("seen.append(output)", "seen.append(output.detach())")), KEEPS),
        "a hook each step, of numbers": (
            changed(WATCHED, ("seen.append(output)", "seen.append(output.mean().item())"), ("seen[-1].mean().item()", "seen[-1]")),
            "more hooks than after the first",
        ),
        "a hook each step, all cleared at the end": (
            changed(
                WATCHED,
                ("seen.append(output)", "seen.append(output.mean().item())"),
                ("seen[-1].mean().item()", "seen[-1]"),
                ("    return means", "    seen.clear()\n    model[1]._forward_hooks.clear()\n    return means"),
            ),
            "Remove only your own hooks",
        ),
        "a hook each step, all removed at the end": (
            changed(
                WATCHED,
                ("seen, means = [], []", "seen, means, handles = [], [], []"),
                ("        model[1].register_forward_hook(", "        handles.append(model[1].register_forward_hook("),
                ("seen.append(output))", "seen.append(output.mean().item())))"),
                ("seen[-1].mean().item()", "seen[-1]"),
                ("    return means", "    [handle.remove() for handle in handles]\n    return means"),
            ),
            "more hooks than after the first",
        ),
        "every hook cleared each step": (
            changed(
                WATCHED,
                ("seen.append(output)", "seen.append(output.mean().item())"),
                (
                    "        means.append(seen[-1].mean().item())",
                    "        model[1]._forward_hooks.clear()\n        means.append(seen.pop())",
                ),
            ),
            "Remove only your own hooks",
        ),
        "the hook stays": (changed(MENDED_WATCHED, ("    handle.remove()\n", "")), "left 1 hook"),
        "means left on the GPU": (
            changed(MENDED_WATCHED, ("mean().item()", "mean().detach()"), ("return means", "return [mean.item() for mean in means]")),
            "3 KiB more",
        ),
        "the hook stays on another layer": (changed(MENDED_WATCHED, ("    handle.remove()\n", "    handle.remove()\n    model[0].register_forward_pre_hook(print)\n")), "left 1 hook"),
        "another forward": (
            changed(
                MENDED_WATCHED,
                ("    handle = model[1].register_forward_hook(lambda module, inputs, output: means.append(output.mean().item()))\n",
                 "    real = model[1].forward\n    model[1].forward = lambda x: (y := real(x), means.append(y.mean().item()))[0]\n"),
                ("    handle.remove()\n", ""),
            ),
            "left something on the model: 1.forward",
        ),
        "the graph kept with backward": (changed(MENDED_WATCHED, (".backward()", ".backward(retain_graph=True)")), "Which argument"),
        "on the CPU, with its graph": (
            changed(MENDED_WATCHED, ("mean().item()", "mean().cpu()"), ("return means", "return [mean.item() for mean in means]")),
            "in the computer's memory",
        ),
        "the input of the layer": (changed(MENDED_WATCHED, ("output.mean()", "inputs[0].mean()")), OTHER),
        "the output layer": (changed(MENDED_WATCHED, ("= model[1]", "= model[2]")), OTHER),
        "nothing watched": (changed(MENDED_WATCHED, ("return means", "return [0.0] * len(means)")), OTHER),
    },
    "06.5": {
        "errors passed over": (changed(MENDED_ROBUSTLY, ("errors.append(str(error))", "pass")), OTHER),
        "names deleted": (changed(ONLY_ERRORS, ("append(error)", "append(error)\n            del x, y")), KNOWS),
        "errors in a tuple": (
            changed(ONLY_ERRORS, ("append(error)", "append((number, error))"), ("for error in errors", "for number, error in errors")),
            KNOWS,
        ),
        "not caught": (changed(MENDED_ROBUSTLY, ("except ValueError", "except KeyError")), "ValueError: batch"),
        "trained on bad batches": (changed(MENDED_ROBUSTLY, ("loss.isnan()", "False")), OTHER),
        "its arguments": (changed(MENDED_ROBUSTLY, ("str(error)", "repr(error)")), OTHER),
        "the traceback kept": (
            changed(
                ONLY_ERRORS,
                ("append(error)", "append((str(error), error.__traceback__))"),
                ("str(error) for error", "text for text, _"),
            ),
            KNOWS,
        ),
        "numbers left out": (changed(MENDED_ROBUSTLY, ("enumerate(batches)", "enumerate(batches, start=1)")), OTHER),
        "stopped at the first": (changed(MENDED_ROBUSTLY, ("str(error))", "str(error))\n            break")), "did not ask for more"),
    },
}  # fmt: skip

# The last script without a function for a step. After a bad batch, `loss` still refers to its graph.
INLINE = (
    MENDED_ROBUSTLY[: MENDED_ROBUSTLY.index("    def step")]
    + """    losses, means, errors = [], [], []
    handle = model[1].register_forward_hook(lambda m, i, output: means.append(output.mean().item()))
    for number, (x, y) in enumerate(batches):
        loss = nn.functional.mse_loss(model(x), y)
        if loss.isnan():
            errors.append(f"batch {number} has no loss")
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    handle.remove()
    return losses, means, errors
"""
)

NO_GRAD = "        with torch.no_grad():\n    "
RIGHT = {
    "06.1": {
        "gradients cleared after the step": changed(
            MENDED_VALIDATE, (STEP, STEP + "        optimizer.zero_grad()\n")
        ),
        "a number each time": MENDED_VALIDATE,
        "under no_grad": changed(VALIDATE, (ERROR, NO_GRAD + ERROR)),
        "detached": changed(
            VALIDATE, ("model(x), y)\n        steps", "model(x), y).detach()\n        steps")
        ),
        "in inference mode, to the CPU": changed(
            VALIDATE,
            (
                ERROR,
                "        with torch.inference_mode():\n            error += nn.functional.l1_loss(model(x), y).cpu()\n",
            ),
        ),
        "an answer that is named": changed(
            VALIDATE,
            (
                ERROR,
                "        said = model(x)\n        error += nn.functional.l1_loss(said, y).item()\n",
            ),
            ("(error / steps).item()", "error / steps"),
        ),
    },
    "06.2": {
        "to the CPU": MENDED_COLLECT,
        "the data": changed(COLLECT, ("output.detach()", "output.data.to('cpu')")),
        "as lists": changed(COLLECT, ("output.detach()", "torch.tensor(output.tolist())")),
        "NumPy": changed(
            COLLECT,
            ("output.detach()", "output.cpu().detach().numpy()"),
            ("torch.cat(outputs).cpu()", "torch.cat([torch.from_numpy(part) for part in outputs])"),
        ),
        "one tensor that grows": changed(
            COLLECT,
            ("outputs = []", "outputs = torch.empty(0)"),
            (
                OUTPUT,
                "        outputs = torch.cat([outputs, output.detach().cpu()]) if len(outputs) else output.detach().cpu()\n",
            ),
            ("torch.cat(outputs).cpu()", "outputs"),
        ),
    },
    "06.3": {
        "numbers": MENDED_SMOOTHED,
        "detached, then to the CPU": changed(
            SMOOTHED, ("retain_graph=True", ""), ("0.1 * loss", "0.1 * loss.detach().cpu()")
        ),
        "tolist": changed(
            SMOOTHED,
            ("retain_graph=True", ""),
            ("0.1 * loss", "0.1 * loss.tolist()"),
            ("[value.item() for value in curve]", "tuple(curve)"),
        ),
        "smoothed at the end": changed(
            SMOOTHED,
            ("retain_graph=True", "retain_graph=False"),
            (
                "        average = 0.9 * average + 0.1 * loss\n        curve.append(average)\n",
                "        curve.append(loss.item())\n",
            ),
            (
                "    return [value.item() for value in curve]",
                "    for index, value in enumerate(curve):\n        average = curve[index] = 0.9 * average + 0.1 * value\n    return curve",
            ),
        ),
    },
    "06.4": {
        "one hook, numbers": MENDED_WATCHED,
        "a hook each step, removed": changed(
            WATCHED,
            ("        model[1]", "        handle = model[1]"),
            (
                "        means.append(seen[-1]",
                "        handle.remove()\n        means.append(seen.pop()",
            ),
        ),
        "without a hook": changed(
            WATCHED,
            ("        " + HOOK, ""),
            ("model(x), y)", "model[2](hidden := model[1](model[0](x))), y)"),
            ("seen[-1].mean()", "hidden.mean()"),
        ),
        "only the last output": changed(
            MENDED_WATCHED,
            (
                "means.append(output.mean().item()))",
                "seen.__setitem__(slice(None), [output.detach()]))",
            ),
            (
                "        optimizer.step()\n",
                "        optimizer.step()\n        means.append(seen.pop().mean().item())\n",
            ),
        ),
    },
    "06.5": {
        "its text": MENDED_ROBUSTLY,
        "without its traceback": changed(
            ONLY_ERRORS, ("append(error)", "append(error.with_traceback(None))")
        ),
        "the first argument": changed(
            ONLY_ERRORS,
            ("append(error)", "append(error.args[0])"),
            ("[str(error) for error in errors]", "errors"),
        ),
        "bad batches skipped": INLINE,
        "a new error": changed(ONLY_ERRORS, ("append(error)", "append(ValueError(*error.args))")),
    },
}
