"""The commands read their own options, and nothing that belongs to the script."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import virtualgpu
from labkit import cli
from virtualgpu import commands

OWN = {  # options of each command, as somebody may give them before the script
    "run": [
        "--gpus 2",
        "--like=H200",
        "--memory 16GiB",
        "--no-values",
        "--virtual-time",
        "--host=0.5",
        "-m",
    ],
    "trace": ["--gpus=2", "--output page.html", "--max-events 7", "--no-timeline", "--module"],
    "fit": ["--like T4,L4", "--steps 5", "--host=here", "-m"],
    "torchrun": [
        "--ranks 4",
        "--timeout=2.5",
        "--in-order",
        "--simulate 8",
        "--network 1Gb/s",
        "--host 2",
    ],
}


def parsers(parser):
    """Return the parsers of all commands, by name."""
    found = {}
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, below in action.choices.items():
                found |= {name: below, **parsers(below)}
    return found


PARSER = cli._parser()
PARSERS = parsers(PARSER)
OPTIONS = sorted({name for parser in PARSERS.values() for name in parser._option_string_actions})
PREFIXES = sorted({name[:end] for name in OPTIONS for end in range(2, len(name) + 1)})
OF_A_SCRIPT = st.one_of(
    st.sampled_from([*PREFIXES, "-h", "--help", "--version", "--", "-", "", "-1", "-mx"]),
    st.builds("{}={}".format, st.sampled_from(PREFIXES), st.sampled_from(["1", "", "T4"])),
    st.text("-=abgmnr 1", max_size=6),
)


@given(st.data())
def test_the_arguments_behind_the_script_belong_to_it(data):
    command = data.draw(st.sampled_from(sorted(OWN)))
    own = data.draw(st.lists(st.sampled_from(OWN[command]), unique=True))
    options = [word for option in own for word in shlex.split(option)]
    end = data.draw(st.sampled_from([[], ["--"]]))
    script = data.draw(st.text(max_size=5) if end else st.sampled_from(["s.py", "a b.py", "-", ""]))
    theirs = data.draw(st.lists(OF_A_SCRIPT, max_size=5))
    found = vars(PARSER.parse_args([command, *options, *end, script, *theirs]))
    alone = vars(PARSER.parse_args([command, *options, "alone.py"]))
    alone |= {"script": script, "arguments": theirs, "command": found["command"]}
    assert found == alone


@pytest.mark.parametrize(
    "theirs", [["--m"], ["--", "--n", "3"], ["-h"], ["--version"], ["--gpus=9"]]
)
def test_each_program_that_has_the_command_run_hands_them_over(theirs, monkeypatch, tmp_path):
    script = tmp_path / "s.py"
    script.write_text("")
    for main in (cli.main, commands.main):
        ran = []
        monkeypatch.setattr(commands.machines, "use", lambda *asked, **named: None)
        for name in ("tell_machine", "set_up_for_times", "_hand_down"):
            monkeypatch.setattr(commands, name, lambda *asked: None)
        monkeypatch.setattr(commands, "run_script", lambda *asked, ran=ran: ran.append(asked))
        assert main(["run", str(script), *theirs]) == 0
        assert ran == [(str(script), theirs, False)]


@pytest.mark.parametrize("command", sorted(PARSERS))
def test_no_command_accepts_abbreviations(command, capsys):
    names = [name for name in PARSERS[command]._option_string_actions if name.startswith("--")]
    for name in names:
        if name[:-1] not in names:
            with pytest.raises(SystemExit) as refused:
                PARSERS[command].parse_args([name[:-1]])
            assert refused.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "the following arguments are required: script"),
        (["run", "--"], "the following arguments are required: script"),
        (["run", "--fast", "s.py"], "unrecognized arguments: --fast"),
        (["trace", "--outptu=x", "s.py"], "--outptu=x. Did you mean --output?"),
        (["top", "--onec"], "labkit top: error: unrecognized arguments: --onec. Did you mean"),
        (["run", "--gpus"], "argument --gpus: expected one argument"),
        (["run", "--gpus", "--like", "T4", "s.py"], "argument --gpus: expected one argument"),
        (["trace", "--memory", "--", "s.py"], "argument --memory: expected one argument"),
    ],
)
def test_mistakes_before_the_script(arguments, said, capsys):
    with pytest.raises(SystemExit) as refused:
        cli.main(arguments)
    assert refused.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--simulate 8 --ranks 4", "--simulate starts no other rank: leave out --ranks"),
        (
            "--simulate 8 --max-restarts 1",
            "--simulate starts no other rank: leave out --max-restarts",
        ),
        ("--rank 3", "--rank 3 needs --simulate, because without --simulate all ranks run"),
    ],
)
def test_options_that_would_change_nothing_are_refused(options, said, capsys):
    assert cli.main(["torchrun", *options.split(), __file__]) == 2
    assert capsys.readouterr().err == f"labkit torchrun: {said}\n"


@pytest.fixture
def shell():
    """A notebook's shell with the magics."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.extension_manager.load_extension("labkit")
    yield shell
    InteractiveShell.clear_instance()


MAGICS = ["torchrun", "gpu_memory", "gpu_timeline"]


@pytest.mark.parametrize("magic", MAGICS)
def test_a_magic_prints_its_help_and_runs_nothing(shell, magic):
    for line in (f"%%{magic} --help\nran = True", f"%%{magic} -h\nran = True", f"%{magic} --help"):
        with capture_output() as captured:
            assert shell.run_cell(line).success
        assert captured.stdout.startswith(f"usage: %%{magic} [-h]") and captured.stderr == ""
        assert captured.stdout == shell.find_cell_magic(magic).__doc__
    assert "ran" not in shell.user_ns


@pytest.mark.parametrize("magic", MAGICS)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--fast", "unrecognized arguments: --fast"),
        ("--he", "unrecognized arguments: --he. Did you mean --help?"),
        ("'", "No closing quotation"),
    ],
)
def test_a_mistake_in_a_magics_line_gets_one_message(shell, magic, line, said):
    with capture_output() as captured:
        raised = shell.run_cell(f"%%{magic} {line}\nran = True").error_in_exec
    assert isinstance(raised, UsageError) and "ran" not in shell.user_ns
    assert captured.stdout + captured.stderr == f"UsageError: %%{magic}: {said}\n"


@pytest.mark.parametrize("magic", MAGICS)
def test_a_magic_without_a_cell_says_so(shell, magic):
    with capture_output() as captured:
        shell.run_cell(f"%{magic}")
    assert captured.stderr == (
        f"UsageError: %%{magic}: expected a cell. Write %%{magic}, with two percent signs, "
        f"above its lines\n"
    )


@pytest.mark.parametrize("magic", MAGICS)
def test_a_cell_that_cannot_be_read_shows_its_line_and_no_call_of_the_kit(shell, magic):
    with virtualgpu.use(), capture_output() as captured:
        shell.run_cell(f"%%{magic}\nx = 1\nif x")
    said = captured.stderr.splitlines()
    assert said[0] == f"UsageError: %%{magic}: the cell cannot be read" and "line 3" in said[1]
    assert (
        said[2:] == ["    if x", "        ^", "SyntaxError: expected ':'"] and captured.stdout == ""
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--like T5", "no profile of a GPU named 'T5'"),
        ("--ranks 0", "ranks=0: choose a whole number"),
        ("--ranks two", "argument --ranks: invalid int value: 'two'"),
        ("--no-values", "virtual_time= and host= are options of virtual GPUs"),
        ("--like T4 --memory banana", "memory='banana'"),
        ("--like T4 --devices cuda", "devices='cuda' asks for real GPUs"),
        ("-o 7up", "expected the name of a variable, such as ranks, got '7up'"),
    ],
)
def test_a_job_that_cannot_be_started_gets_one_message(shell, line, said):
    with capture_output() as captured:
        raised = shell.run_cell(f"%%torchrun {line}\n1").error_in_exec
    assert isinstance(raised, UsageError) and said in str(raised)
    assert captured.stdout == "" and len(captured.stderr.splitlines()) == 1


def test_the_command_and_the_magic_have_the_same_options(shell):
    words = shell.find_cell_magic("torchrun").__doc__.split()
    in_terminals = {"--rank", "--in-order", "--module"}
    names = {name for name in PARSERS["torchrun"]._option_string_actions if name.startswith("--")}
    assert names - in_terminals <= {word.strip(",") for word in words}


def test_the_function_and_the_command_have_the_same_defaults():
    import inspect

    from labkit import torchrun

    options = vars(cli._parser().parse_args(["torchrun", "s.py"]))
    parameters = inspect.signature(torchrun).parameters
    differ = {
        name
        for name in options.keys() & parameters.keys() - {"script", "arguments"}
        if options[name] != parameters[name].default
    }
    # A command may run for days. It reads "here" for a host only when it starts.
    assert differ == {"timeout", "host"}
    assert float(options["host"]) == parameters["host"].default
