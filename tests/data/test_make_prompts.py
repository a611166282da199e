from lit_vgrpo.data.make_prompts import HELDOUT_FILE, TRAIN_FILE, files, write
from lit_vgrpo.data.prompts import read_prompts
from lit_vgrpo.paths import resolve_path


def test_the_shipped_files_are_what_the_script_writes(tmp_path):
    write(tmp_path)
    for name in (TRAIN_FILE, HELDOUT_FILE):
        assert resolve_path(f"shipped:prompts/{name}").read_bytes() == (tmp_path / name).read_bytes()
        assert [row["prompt"] for row in read_prompts(tmp_path / name)] == files()[name]


def test_train_and_heldout_are_disjoint_and_without_duplicates():
    train, heldout = files()[TRAIN_FILE], files()[HELDOUT_FILE]
    assert (len(train), len(heldout)) == (400, 60)
    assert len({*train, *heldout}) == 460
