"""Votes in their file, and the reward that waits for them."""

import sqlite3
import threading
import time

import pytest
import torch

from lit_vgrpo.rewards import Reward, RewardOutage, ScoreQueue, VoteReward, Weighted
from lit_vgrpo.rewards.bradley_terry import choice_scores
from lit_vgrpo.rewards.vote_groups import Demand
from lit_vgrpo.rewards.vote_store import FILE_NAME, VoteRefused, VoteStore, VoteStoreError


class Brightest(Reward):
    name = "brightness"

    def __call__(self, images, prompts, rows):
        return images.mean((1, 2, 3))


@pytest.fixture
def store(tmp_path):
    return VoteStore(tmp_path / FILE_NAME)


def group(name, size):
    return name, f"prompt of {name}", {f"{name}{number}": b"png" for number in range(size)}


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
    from lit_vgrpo.rewards.png import decode_png

    return max(comparison.images, key=lambda image: int(decode_png(store.image(image)).max()))


# --- what is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "shown", "needed"), [(4, 4, 1), (4, 2, 3), (8, 4, 3), (8, 2, 7), (3, 4, 1), (1, 4, 0)]
)
def test_the_fewest_comparisons_show_and_connect_every_image(store, size, shown, needed):
    numbers = store.publish([group("a", size)], Demand(shown))
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


def test_the_closest_of_the_least_shown_meet(store):
    store.publish([group("a", 4)], Demand(2))
    winners = []
    for _ in range(2):  # every image once
        comparison = store.next_comparison("ann")
        winners.append(comparison.images[0])
        store.vote(comparison.id, "ann", comparison.images[0])
    last = store.next_comparison("ann")
    assert set(last.images) in (set(winners), {f"a{number}" for number in range(4)} - set(winners))


def test_voters_get_different_comparisons_and_none_twice(store):
    store.publish([group("a", 2), group("b", 2)], Demand(2, voters=2))
    first = store.next_comparison("ann")
    assert store.next_comparison("bob", busy={first.id}).id != first.id
    for voter in ("ann", "bob"):
        seen = []
        while (comparison := store.next_comparison(voter)) is not None:
            store.vote(comparison.id, voter, sorted(comparison.images)[0 if voter == "ann" else len(seen)])
            seen.append(comparison.id)
        assert len(set(seen)) == len(seen) == 2
    progress = store.progress()
    assert (progress.given, progress.needed, progress.voters) == (4, 4, 2)
    assert (progress.same, progress.compared) == (1, 2)


def test_a_vote_can_be_undone_until_it_is_used_and_a_skip_counts(store):
    numbers = store.publish([group("a", 2)], Demand(2))
    with pytest.raises(VoteRefused, match="There is no vote to undo"):
        store.undo("ann")
    comparison = store.next_comparison("ann")
    store.vote(comparison.id, "ann", None)
    store.vote(comparison.id, "ann", None)  # sent again by a browser that saw no answer
    assert (store.progress().given, store.progress().skipped) == (1, 1)
    assert store.undo("ann") == comparison
    assert store.progress().given == 0
    with pytest.raises(VoteRefused, match="images that do not exist"):
        store.vote(comparison.id, "ann", "b0")
    with pytest.raises(VoteRefused, match="images that do not exist"):
        store.vote(comparison.id + 1, "ann", "a0")
    store.vote(comparison.id, "ann", "a0")
    with pytest.raises(VoteRefused, match="You have voted on these images already"):
        store.vote(comparison.id, "ann", "a1")
    store.close(numbers, keep_images=False)
    with pytest.raises(VoteRefused, match="training has used it"):
        store.undo("ann")
    with pytest.raises(VoteRefused, match="Voting on these images has ended"):
        store.vote(comparison.id, "bob", "a0")
    assert store.image("a0") is None
    assert store.scores(numbers)[0]["a0"] == pytest.approx(-store.scores(numbers)[0]["a1"])


def test_a_rank_closes_its_own_groups_and_those_of_ranks_that_are_gone(store):
    for rank in (0, 1, 2):
        store.publish([group(f"old {rank}", 2)], Demand(2), rank, num_owners=3)
    store.publish([group("new", 2)], Demand(2), owner=0, num_owners=2)
    asked = []
    while (comparison := store.next_comparison("ann")) is not None:
        asked.append(comparison.prompt)
        store.vote(comparison.id, "ann", None)
    assert sorted(asked) == ["prompt of new", "prompt of old 1"]


# --- the file --------------------------------------------------------------------------------------------------------


def test_an_unusable_file_is_refused_and_left_alone(tmp_path):
    path = tmp_path / FILE_NAME
    VoteStore(path)
    whole = path.read_bytes()

    def refused(content, words):
        path.write_bytes(content)
        with pytest.raises(VoteStoreError, match=words):
            VoteStore(path)
        assert path.read_bytes() == content

    refused(b"not a database at all" * 100, "is damaged: file is not a database. Move it away to start anew")
    refused(whole[:4096] + b"\xff" * 4096 + whole[8192:], "is damaged")
    path.write_bytes(whole)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    refused(path.read_bytes(), "has version 9 of votes, and this lit-vgrpo reads version 1")
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE other (a)")
    db.close()
    refused(path.read_bytes(), "is not a file of votes")
    with pytest.raises(VoteStoreError, match="cannot be used: unable to open database file"):
        VoteStore(tmp_path / "missing" / FILE_NAME)


# --- the reward ------------------------------------------------------------------------------------------------------


def test_scores_are_fitted_within_each_prompt_whatever_the_batches(tmp_path):
    reward = VoteReward(images_per_vote=2, folder=str(tmp_path))
    queue = ScoreQueue(Weighted([reward, Brightest()], [1.0, 0.0]))
    voter = vote_in_thread(tmp_path / FILE_NAME, brightest, 3 + 1)
    queue.put(grey(0.1, 0.9, 0.2), ["a", "a", "b"], [{}] * 3)  # both groups go on in the next batch
    queue.put(grey(0.5, 0.8, 0.3), ["b", "a", "a"], [{}] * 3)
    scores = queue.take()
    voter.join()
    assert scores.parts["brightness"].tolist() == pytest.approx([0.1, 0.9, 0.2, 0.5, 0.8, 0.3], abs=0.01)
    a, b = scores.parts["votes"][[0, 1, 4, 5]], scores.parts["votes"][[2, 3]]
    assert int(a.argmax()) == 1
    assert int(a.argmin()) in (0, 3)
    assert b.tolist() == pytest.approx(choice_scores([(1, [0, 1])], 2).tolist())
    assert a.sum() == pytest.approx(0, abs=1e-6)
    assert scores.counts["votes"] == {"given": 4, "skipped": 0, "voters": 1}


def test_votes_on_the_same_pixels_are_kept_and_twins_share_a_score(tmp_path):
    images, prompts = grey(0.1, 0.9, 0.9), ["a"] * 3
    voter = vote_in_thread(tmp_path / FILE_NAME, brightest, 1)
    first = VoteReward(folder=str(tmp_path))(images, prompts, [{}] * 3)
    voter.join()
    assert first[1] == first[2] > first[0]
    assert torch.equal(VoteReward(folder=str(tmp_path))(images, prompts, [{}] * 3), first)  # nobody votes


def test_what_happens_when_votes_are_late(tmp_path, capsys):
    settings = {"images_per_vote": 2, "timeout_s": 0.1, "folder": str(tmp_path)}
    images, prompts = grey(0.1, 0.9, 0.2, 0.4), ["a", "a", "b", "b"]
    with pytest.raises(RewardOutage, match=r"2 of 2 votes are missing after 0\.1 s\. Vote, then resume the run"):
        VoteReward(when_late="stop", **settings)(images, prompts, [{}] * 4)
    vote_in_thread(tmp_path / FILE_NAME, brightest, 1).join()
    late = VoteReward(when_late="continue", **settings)
    scores = late(images, prompts, [{}] * 4)
    assert scores[0] < 0 < scores[1]
    assert scores[2:].tolist() == [0, 0]
    assert late.take_counts() == {"late": 1, "given": 1, "skipped": 0, "voters": 1}
    capsys.readouterr()
    voter = threading.Timer(0.6, lambda: vote_in_thread(tmp_path / FILE_NAME, brightest, 1))
    voter.start()
    VoteReward(when_late="wait", **settings)(images, prompts, [{}] * 4)
    assert "1 of 2 votes are missing after 0.1 s. The page to vote: lightning vote" in capsys.readouterr().err


def test_a_setting_without_a_meaning_is_refused():
    with pytest.raises(ValueError, match="when_late=stop has no effect without a time limit. Set timeout_s to seconds"):
        VoteReward(when_late="stop")


def test_held_out_images_are_scored_by_others():
    people, other = VoteReward(), Brightest()
    assert Weighted([people]).observing(Weighted([other])).weight_of == {"brightness": 1.0}
    both = Weighted([people, other])
    assert both.observing(None).weight_of == {"brightness": 0.5}
    assert both.asks_people
    assert not both.observing(None).asks_people
    assert Weighted([people]).observing(None).asks_people  # refused where there are held-out prompts
