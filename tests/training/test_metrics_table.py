"""The table of a run that goes on holds what came before, once; another file of its name is moved aside."""

import pytest

from lit_vgrpo.training.loggers import MetricsTable, read_table, rows_up_to
from lit_vgrpo.training.resume import Progress


def table(folder, keep=None):
    return MetricsTable(folder, keep)


def log(logger, *rows):
    for row in rows:
        logger.log_metrics(row, step=int(row.get("epoch", 0)) * 2)


def test_rows_go_on_after_the_checkpoint_and_new_columns_join(tmp_path):
    log(table(tmp_path), {"heldout": 0.5}, {"a": 1.0, "epoch": 0}, {"a": 2.0, "epoch": 1}, {"a": 3.0, "epoch": 2})
    again = table(tmp_path, rows_up_to(Progress(iterations=2, optimizer_steps=4, images=8, batches=8, logged=2)))
    log(again, {"a": 4.0, "epoch": 2}, {"b": 5.0, "epoch": 3})
    columns, rows = read_table(tmp_path / "metrics.csv")
    assert columns == ["a", "b", "epoch", "heldout", "step"]
    assert [(row["epoch"], row["a"], row["b"], row["heldout"]) for row in rows] == [
        ("", "", "", "0.5"),
        ("0", "1.0", "", ""),
        ("1", "2.0", "", ""),
        ("2", "4.0", "", ""),
        ("3", "", "5.0", ""),
    ]


def test_a_new_run_starts_a_new_table(tmp_path):
    log(table(tmp_path), {"a": 1.0})
    log(table(tmp_path), {"b": 2.0})
    assert read_table(tmp_path / "metrics.csv") == (["b", "step"], [{"b": "2.0", "step": "0"}])


def test_a_line_that_was_being_written_is_left_out(tmp_path):
    log(table(tmp_path), {"a": 1.25, "epoch": 0}, {"a": 2.25, "epoch": 1})
    path = tmp_path / "metrics.csv"
    whole = path.read_text()
    for cut in (1, 4, 7):
        path.write_text(whole[:-cut])
        assert [row["a"] for row in read_table(path)[1]] == ["1.25"]


def test_nothing_is_lost_while_the_header_changes(tmp_path, monkeypatch):
    logger = table(tmp_path)
    log(logger, {"a": 1.0})
    before = (tmp_path / "metrics.csv").read_text()

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_vgrpo.training.loggers.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        log(logger, {"b": 2.0})
    assert (tmp_path / "metrics.csv").read_text() == before


def directory(path):
    path.mkdir()
    (path / "inside").write_text("x")


FOREIGN = {
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 20),
    "a picture": lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\n"),
    "zeros": lambda path: path.write_bytes(b"\0" * 5000),
    "other columns": lambda path: path.write_text("Step,loss\n1,2\n3,4\n"),
    "no numbers": lambda path: path.write_text("step,epoch\nfirst,second\n"),
    "utf-16": lambda path: path.write_text("step,epoch\n1,0\n", encoding="utf-16"),
    "a long line": lambda path: path.write_text("step\n" + 200_000 * "1" + "\n"),
    "a folder": directory,
    "a link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_table_of_a_run_is_moved_aside(tmp_path, make):
    path, aside = tmp_path / "metrics.csv", tmp_path / "metrics.csv.foreign"
    aside.write_text("an earlier one")
    make(path)
    before = path.read_bytes() if path.is_file() else None
    after_one = rows_up_to(Progress(iterations=1, optimizer_steps=2, images=4, batches=4, logged=1))
    with pytest.warns(
        UserWarning, match="metrics.csv is not a metrics table .*. It was renamed to metrics.csv.foreign-2, "
    ):
        log(table(tmp_path, after_one), {"a": 1.0, "epoch": 1})
    assert read_table(path) == (["a", "epoch", "step"], [{"a": "1.0", "epoch": "1", "step": "2"}])
    assert aside.read_text() == "an earlier one"
    moved = tmp_path / "metrics.csv.foreign-2"
    assert moved.read_bytes() == before if before is not None else moved.is_symlink() or (moved / "inside").is_file()


def test_a_file_that_somebody_replaces_during_a_run_does_not_end_it(tmp_path):
    logger = table(tmp_path)
    log(logger, {"a": 1.0})
    (tmp_path / "metrics.csv").write_bytes(b"\xff\xfe\0\n")
    with pytest.warns(UserWarning, match="renamed to metrics.csv.foreign, and a new one was started"):
        log(logger, {"b": 2.0})
    assert read_table(tmp_path / "metrics.csv")[1] == [{"a": "", "b": "2.0", "step": "0"}]


@pytest.mark.parametrize(
    "torn",
    [
        b"5.0,4\r\n",  # a row of another length, as a full disk leaves it in the middle
        b"5.0,4,8,9\r\n",
        b"\0\0\0\0\0\0\0\0\r\n",  # what a power cut leaves of a row
        b"5.0,\xff\xfe,8\r\n",
        b"\0" * 500,
        b"5.0,2",
    ],
)
def test_a_damaged_row_costs_no_other(tmp_path, torn):
    log(table(tmp_path), {"a": 1.0, "epoch": 0}, {"a": 2.0, "epoch": 1})
    path = tmp_path / "metrics.csv"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-1], torn, *lines[-1:]]) if torn.endswith(b"\n") else b"".join([*lines, torn]))
    again = table(tmp_path, rows_up_to(Progress(iterations=2, optimizer_steps=4, images=8, batches=8, logged=2)))
    log(again, {"a": 3.0, "epoch": 2})
    assert [row["a"] for row in read_table(path)[1]] == ["1.0", "2.0", "3.0"]


def test_an_empty_table_is_begun_anew(tmp_path):
    (tmp_path / "metrics.csv").write_text("")
    log(table(tmp_path, rows_up_to(Progress(1, 2, 4, 4, 1))), {"a": 1.0, "epoch": 1})
    assert read_table(tmp_path / "metrics.csv")[1] == [{"a": "1.0", "epoch": "1", "step": "2"}]
