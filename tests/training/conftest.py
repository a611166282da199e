import pytest


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, tiny_sd3):
    """The run folder of one process to which nothing happens."""
    from engines import WORDS, prepared  # imports torch, which the process that hands tests out does not need
    from processes import run_command

    folder = prepared(tmp_path_factory.mktemp("undisturbed"), tiny_sd3)
    (folder / "hold").unlink()
    done = run_command("run", "tiny.yaml", "run_dir=run", *WORDS, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"
