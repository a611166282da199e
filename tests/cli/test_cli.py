"""The command before anything heavy is imported."""

import os
import subprocess
import sys

import pytest

from lit_vgrpo import __version__
from lit_vgrpo.cli.main import main
from lit_vgrpo.cli.subcommands import SUBCOMMANDS


def test_help_and_version(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"lightning {name}" in out for name in SUBCOMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lit-vgrpo {__version__}\n"


@pytest.mark.parametrize("args", [[], ["train"]])
def test_anything_else_is_one_helpful_line(args, capsys):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "lightning run tiny_shapes" in err


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_usage(name, capsys):
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: lightning {name} ")
    assert main([name]) == (2 if SUBCOMMANDS[name].needs_arguments else 0)


def test_help_may_come_last(capsys):
    assert main(["run", "tiny_shapes", "trainer.max_epochs=3", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: lightning run ")


def test_subcommands_exist():
    from importlib import import_module

    for subcommand in SUBCOMMANDS.values():
        module, function = subcommand.target.split(":")
        assert callable(getattr(import_module(module), function))


def test_importing_the_shim_imports_nothing_heavy():
    code = "import sys, lit_vgrpo.cli; print({'torch', 'lightning', 'diffusers', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", ["run", "check", "compare", "check-reward"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [1, 2\ndata: 3\n", "broken.yaml line 2 is not YAML: "),
        ("- a\n- b\n", "broken.yaml is not a recipe: its top level must be a mapping"),
        (None, "broken.yaml is not a recipe: no such file, and not a shipped name."),
    ],
)
def test_a_recipe_that_cannot_be_read_is_answered_before_imports(tmp_path, monkeypatch, capsys, name, text, said):
    """The subcommand itself, which would import torch, is not reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_vgrpo.cli.main.import_module", lambda module: pytest.fail(f"imported {module}"))
    if text is not None:
        (tmp_path / "broken.yaml").write_text(text)
    assert main([name, "broken.yaml", "trainer.max_epochs=1"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_looking_at_a_recipe_imports_nothing_heavy():
    code = """
import sys
from lit_vgrpo.cli.main import main
assert main(["run", "tiny_shape"]) == 2
print({"torch", "lightning", "diffusers", "transformers", "numpy"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    assert (
        done.stderr == "tiny_shape is not a recipe: no such file, and not a shipped name. Did you mean tiny_shapes?\n"
    )


@pytest.mark.slow
def test_a_check_ends_with_its_threads_and_exit_handlers():
    """In a process that has imported torch alone, with a thread that outlives the command."""
    code = """
import atexit, sys, threading, time, gc
from lit_vgrpo.cli.main import main
sys.argv[1:] = ["check", "tiny_shapes"]
status = main()
print(gc.isenabled(), "torch._inductor.compile_fx" in sys.modules)
threading.Thread(target=lambda: (time.sleep(.2), print("thread"))).start()
atexit.register(print, "handler")
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
    # bitsandbytes, where it is installed, would have imported the compiler
    assert done.stdout.endswith("for world size 1.\nTrue False\nthread\nhandler\n")


def test_module_and_argv():
    done = subprocess.run([sys.executable, "-m", "lit_vgrpo", "train"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'train' is not a subcommand" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("redirect", ["2>&1 | true", ">&-"])  # read by nobody
@pytest.mark.skipif(not os.path.exists("/bin/bash"), reason="needs a shell")
def test_output_that_nobody_reads_is_no_error(redirect):
    # Slow enough for the reader to have left.
    slow = f"{sys.executable} -c 'import time; time.sleep(.3); import sys; from lit_vgrpo.cli.main import main; "
    script = f'{slow}sys.argv[1:] = ["--help"]; sys.exit(main())\' {redirect}; echo status ${{PIPESTATUS[0]}} >&2'
    done = subprocess.run(["/bin/bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == "status 0\n"


@pytest.mark.slow
def test_other_subcommands_go_to_the_lightning_sdk_where_it_is_installed(tmp_path):
    package = tmp_path / "lightning_sdk" / "cli"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "entrypoint.py").write_text("import sys\ndef main_cli():\n    print('sdk', sys.argv[1:])\n    return 3")
    script = tmp_path / "lightning"
    script.write_text("import sys\nfrom lit_vgrpo.cli.main import main\nsys.exit(main())\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def call(*args):
        return subprocess.run([sys.executable, script, *args], capture_output=True, text=True, env=env, cwd=tmp_path)

    done = call("login", "--force")
    assert (done.returncode, done.stdout) == (3, "sdk ['login', '--force']\n")
    assert call("run", "--help").stdout.startswith("usage: lightning run")
