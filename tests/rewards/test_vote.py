"""Votes in their file, and the reward that waits for them."""

import math
import sqlite3
import threading
import time
from io import BytesIO

import pytest
import torch
from helpers import Brightness
from PIL import Image
from scipy.optimize import minimize

from lit_vgrpo.rewards import Frames, ScoreQueue, VoteReward, Weighted
from lit_vgrpo.rewards.vote_store import FILE_NAME, VoteRefused, VoteStore, VoteStoreError, choice_scores


@pytest.fixture
def store(tmp_path):
    return VoteStore(tmp_path / FILE_NAME)


def groups(size, *names):
    return [(f"prompt of {name}", {f"{name}{number}": b"png" for number in range(size)}) for name in names]


def grey(*levels):
    return torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 3, 4, 4)


def vote_in_thread(path, choose, votes, voter="ann"):
    """Answer ``votes`` comparisons as soon as they are asked for."""

    def work():
        store, left = VoteStore(path), votes
        while left:
            comparison = store.next_comparison(voter)
            if comparison is None:
                time.sleep(0.01)
                continue
            store.vote(comparison.id, voter, choose(store, comparison))
            left -= 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def brightest(store, comparison):
    """The image with the largest pixel value, of images of one grey each."""
    return max(comparison.images, key=lambda image: Image.open(BytesIO(store.image(image))).getpixel((0, 0)))


@pytest.mark.parametrize(
    ("size", "shown", "needed"), [(4, 4, 1), (4, 2, 3), (8, 4, 3), (8, 2, 7), (3, 4, 1), (1, 4, 0)]
)
def test_the_fewest_comparisons_show_and_connect_every_image(store, size, shown, needed):
    numbers = store.publish(groups(size, "a"), shown)
    connected, count = [], 0
    while (comparison := store.next_comparison("ann")) is not None:
        assert len(set(comparison.images)) == len(comparison.images) == min(shown, size)
        parts = [part for part in connected if part & set(comparison.images)]
        connected = [part for part in connected if part not in parts] + [set(comparison.images).union(*parts)]
        store.vote(comparison.id, "ann", comparison.images[0])
        count += 1
    assert count == needed
    assert store.progress(numbers).given == needed
    if needed:
        assert connected == [{f"a{number}" for number in range(size)}]


def test_voters_get_different_comparisons_and_none_twice(store):
    store.publish(groups(2, "a", "b"), 2, voters=2)
    for voter in ("ann", "bob"):
        seen = []
        while (comparison := store.next_comparison(voter)) is not None:
            store.vote(comparison.id, voter, sorted(comparison.images)[0 if voter == "ann" else len(seen)])
            seen.append(comparison.id)
        assert len(set(seen)) == len(seen) == 2
    assert (store.progress().given, store.progress().needed) == (4, 4)


def test_a_vote_can_be_undone_until_it_is_used_and_a_skip_counts(store):
    numbers = store.publish(groups(2, "a"), 2)
    with pytest.raises(VoteRefused, match="no vote to undo"):
        store.undo("ann")
    comparison = store.next_comparison("ann")
    store.vote(comparison.id, "ann", None)
    store.vote(comparison.id, "ann", None)  # sent again by a browser that saw no answer
    assert (store.progress().given, store.progress().skipped) == (1, 1)
    assert store.undo("ann") == comparison
    assert store.progress().given == 0
    assert store.close(numbers) is None, "undone since the end of the wait"
    with pytest.raises(VoteRefused, match="These images do not exist"):
        store.vote(comparison.id, "ann", "b0")
    store.vote(comparison.id, "ann", "a0")
    with pytest.raises(VoteRefused, match="You have already voted on these images"):
        store.vote(comparison.id, "ann", "a1")
    assert store.close(numbers).given == 1
    with pytest.raises(VoteRefused, match="training has used it"):
        store.undo("ann")
    with pytest.raises(VoteRefused, match="Voting on these images has ended"):
        store.vote(comparison.id, "bob", "a0")
    assert store.image("a0") is None
    assert store.scores(numbers)[0]["a0"] == pytest.approx(-store.scores(numbers)[0]["a1"])


def test_another_size_replaces_the_comparisons_without_votes(store):
    for size, needed in ((2, 3), (4, 2), (2, 3)):  # with the pair that is answered
        store.publish(groups(4, "a"), size)
        if not store.progress().given:
            store.vote(store.next_comparison("ann").id, "ann", None)
        assert (store.progress().given, store.progress().needed) == (1, needed)


def test_a_rank_closes_its_own_groups_and_those_of_ranks_that_are_gone(store):
    for rank in (0, 1, 2):
        store.publish(groups(2, f"old {rank}"), 2, 1, rank, num_owners=3)
    store.publish(groups(2, "new"), 2, owner=0, num_owners=2)
    asked = []
    while (comparison := store.next_comparison("ann")) is not None:
        asked.append(comparison.prompt)
        store.vote(comparison.id, "ann", None)
    assert sorted(asked) == ["prompt of new", "prompt of old 1"]


def test_an_unusable_file_is_refused_and_left_alone(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(VoteStoreError, match="cannot be used: file is not a database. .* move the file aside"):
        VoteStore(path)
    assert path.read_bytes() == b"not a database at all" * 100
    with pytest.raises(VoteStoreError, match="unable to open database file"):
        VoteStore(tmp_path / "missing" / FILE_NAME)
    link = tmp_path / "link.sqlite3"
    link.symlink_to(tmp_path / "other.sqlite3")
    with pytest.raises(VoteStoreError, match="is a link"):
        VoteStore(link)
    assert not (tmp_path / "other.sqlite3").exists()


@pytest.mark.parametrize(
    ("change", "use"),
    [
        ("DELETE FROM groups", lambda store: store.scores([1])),
        ("UPDATE votes SET image = 'none'", lambda store: store.scores([1])),
        ("UPDATE groups SET images = NULL", VoteStore.progress),
        ("UPDATE groups SET images = 'x'", VoteStore.progress),
        ("UPDATE groups SET voters = NULL", lambda store: store.next_comparison("bob")),
    ],
)
def test_damaged_rows_are_one_line(store, change, use):
    store.publish([("a cat", {"a": b"1", "b": b"2"})], voters=2)
    store.vote(1, "ann", "a")
    with sqlite3.connect(store.path) as db:
        db.execute(change)
    with pytest.raises(VoteStoreError, match="cannot be used: its content is damaged. Check the disk, or move"):
        use(store)


def reward_in(folder, **options):
    reward = VoteReward(**options)
    reward.enter_run(folder)
    return reward


def test_scores_are_fitted_within_each_prompt_whatever_the_batches(tmp_path):
    reward = reward_in(tmp_path, images_per_vote=2)
    queue = ScoreQueue(Weighted([reward, Brightness()], [1.0, 0.0]))
    voter = vote_in_thread(tmp_path / FILE_NAME, brightest, 3 + 1)
    queue.put(grey(0.1, 0.9, 0.2), ["a", "a", "b"], [{}] * 3)  # both groups go on in the next batch
    queue.put(grey(0.5, 0.8, 0.3), ["b", "a", "a"], [{}] * 3)
    scores = queue.take()
    voter.join()
    assert scores.parts["brightness"].tolist() == pytest.approx([0.1, 0.9, 0.2, 0.5, 0.8, 0.3], abs=0.01)
    a, b = scores.parts["votes"][[0, 1, 4, 5]], scores.parts["votes"][[2, 3]]
    assert int(a.argmax()) in (1, 2)
    assert int(a.argmin()) in (0, 3)
    assert b.tolist() == pytest.approx(choice_scores([(1, [0, 1])], 2).tolist())
    assert a.sum() == pytest.approx(0, abs=1e-6)
    assert scores.counts["votes"] == {"given": 4, "skipped": 0}


def test_a_prompt_that_edits_two_pictures_is_asked_twice(tmp_path):
    rows = [{"image": picture} for picture in ("car.png", "car.png", "cat.png", "cat.png")]
    voter = vote_in_thread(tmp_path / FILE_NAME, brightest, 2)
    scores = reward_in(tmp_path)(grey(0.1, 0.9, 0.2, 0.3), ["make it red"] * 4, rows)
    assert scores[1] == scores[3] > scores[0] == scores[2]
    voter.join()


def test_votes_on_the_same_pixels_are_kept_and_twins_share_a_score(tmp_path):
    images, prompts = grey(0.1, 0.9, 0.9), ["a"] * 3
    voter = vote_in_thread(tmp_path / FILE_NAME, brightest, 1)
    first = reward_in(tmp_path)(images, prompts, [{}] * 3)
    voter.join()
    assert first[1] == first[2] > first[0]
    assert torch.equal(reward_in(tmp_path)(images, prompts, [{}] * 3), first)  # nobody votes


def test_a_long_wait_is_reported_again_after_twice_the_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lit_vgrpo.rewards.vote.POLL_S", 0.01)
    monkeypatch.setattr("lit_vgrpo.rewards.vote.REMINDER_S", 0.02)

    def late(store, comparison):
        time.sleep(0.3)
        return comparison.images[0]

    voter = vote_in_thread(tmp_path / FILE_NAME, late, 1)
    reward_in(tmp_path)(grey(0.1, 0.9), ["a"] * 2, [{}] * 2)
    voter.join()
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("Waiting for 1 vote (about 5 s at 5 s per vote). Open the voting page: lightning vote ")
    assert set(others) == {f"Still w{first[1:]}"}
    assert 1 <= len(others) <= 4  # after 0.02, 0.04, 0.08, 0.16 s


def test_held_out_images_are_scored_by_others():
    people, other = VoteReward(), Brightness()
    assert Weighted([people]).observing(Weighted([other])).weight_of == {"brightness": 1.0}
    both = Weighted([people, other])
    assert both.observing(None).weight_of == {"brightness": 0.5}
    assert both.compares
    assert Frames(people).compares
    assert not both.observing(None).compares
    assert Weighted([people]).observing(None).compares  # refused where there are held-out prompts


def negative_log_posterior(scores, choices, prior_std):
    """The definition, in plain Python."""
    total = sum(score**2 for score in scores) / (2 * prior_std**2)
    for chosen, shown in choices:
        total -= scores[chosen] - math.log(sum(math.exp(scores[item]) for item in shown))
    return total


@pytest.mark.parametrize(
    "choices",
    [
        [],
        [(0, [0, 1, 2, 3])],
        [(2, [0, 1, 2, 3]), (1, [1, 2]), (1, [0, 1]), (3, [0, 3])],
        [(0, [0, 1])] * 50 + [(2, [2, 1])] * 50,  # items that always win have no finite maximum without the prior
    ],
)
@pytest.mark.parametrize("prior_std", [0.5, 1.5, 20.0])
def test_the_fit_is_the_maximum(choices, prior_std):
    scores = choice_scores(choices, 4, prior_std)
    best = minimize(negative_log_posterior, [0.0] * 4, (choices, prior_std), method="BFGS", options={"gtol": 1e-7})
    assert scores.isfinite().all()
    assert scores.tolist() == pytest.approx(list(best.x), abs=2e-4 * prior_std)
    assert float(scores.sum()) == pytest.approx(0, abs=1e-7)
