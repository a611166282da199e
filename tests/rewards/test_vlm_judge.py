import json

import fault_server as errors
import numpy as np
import pytest
import torch
from fault_server import FaultServer, answering, saying

from lit_vgrpo.rewards import Connection, VLMJudge, Weighted
from lit_vgrpo.rewards.vote_store import choice_scores


def judge(server, **options):
    patience = {"timeout_s": 20, "retries": 1, "backoff_s": 0.0, **options.pop("connection", {})}
    return VLMJudge(f"{server.address}/v1", model="judge-7b", connection=Connection(**patience), **options)


def shades_of(body):
    """The grey levels of a request's images."""
    parts = json.loads(body)["messages"][0]["content"][:-1]
    data = [part["image_url"]["url"].split(",", 1)[1] for part in parts]
    return [round(mean * 255) for mean in errors.pixel_means(json.dumps({"images": data}).encode())]


def batch(count=1, prompt="a red cube", **fields):
    shades = torch.arange(count).view(-1, 1, 1, 1) * 10 / 255
    return shades.expand(-1, 3, 4, 5), [prompt] * count, [{"prompt": prompt, **fields}] * count


def score(text, finish="stop", **options):
    with FaultServer([saying(text, finish)]) as server:
        reward = judge(server, **options)
        result = reward(*batch())
    return result.item(), reward.take_counts(), reward.failure


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cube (object): 1\nFinal Score: 4", 4.0),
        ("**Final Score:** 3.5", 3.5),
        ("final score = 2/5", 2.0),
        ("**Final Score (1-5): 4**", 4.0),
        ("Final Score [1 to 5]\n4.5", 4.5),
        ("**Final score** (out of 5) = 3/5", 3.0),
        ("Final Score: (2)\n5 elements are missing.", 2.0),
        ("Final Score: 5. On second thoughts.\nFinal Score: 1.25", 1.25),
    ],
)
def test_the_last_score_of_the_answer_counts(text, expected):
    assert score(text) == (expected, {}, None)


@pytest.mark.parametrize("text", ["I would\nrather not say.", None, "Final Score: 10", "Final Score (1\u20135): good"])
def test_an_answer_without_a_valid_score_is_a_counted_failure(text):
    result, counts, failure = score(text, finish="length")
    assert np.isnan(result)
    assert counts == {"unparsable": 1}, "an answer that came is not asked for again"
    assert "no score from 1 to 5 (finish_reason: length)" in failure
    assert "\n" not in failure


def test_a_pattern_finds_the_score_in_a_json_object():
    options = {"score_pattern": '"score": *(-?[0-9.]+)', "score_range": None}
    assert score('Thinking. ```json\n{"why": "x", "score": 1200}\n```', **options)[0] == 1200
    assert np.isnan(score('{"score": NaN}', **options)[0])


def test_the_request_holds_the_picture_the_question_and_the_settings(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    with FaultServer(then=saying("Final Score: 3")) as server:
        reward = judge(
            server,
            prompt_template='Is {prompt} in it? Answer {"score": 1} to {"score": 5}.',
            extra_body={"top_p": 0.5, "temperature": 1.0},
            connection={"token_env": "JUDGE_TOKEN", "max_connections": 1},
        )
        reward(*batch(2, prompt="{place} {0}"))
        asked = [(headers, json.loads(body)) for headers, body in server.requests if body]
    for number, (headers, body) in enumerate(asked):
        assert headers["Authorization"] == "Bearer s3cret"
        assert shades_of(json.dumps(body)) == [10 * number], "another image's picture was sent"
        picture, question = body.pop("messages")[0]["content"]
        assert body == {"model": "judge-7b", "temperature": 1.0, "seed": 0, "max_tokens": 1024, "top_p": 0.5}
        assert question["text"] == 'Is {place} {0} in it? Answer {"score": 1} to {"score": 5}.'
        assert picture["image_url"]["url"].startswith("data:image/png;base64,")


def test_scores_keep_the_order_of_the_images():
    def by_brightness(handler):
        saying(f"Final Score: {1 + shades_of(handler.body)[0] / 255}")(handler)

    with FaultServer([answering(b"", 500)] * 3, then=by_brightness) as server:
        reward = judge(server, connection={"max_connections": 4, "retries": 3})
        scores = reward(*batch(12))
    torch.testing.assert_close(scores, 1 + torch.arange(12) * 10 / 255)
    assert reward.take_counts() == {"retried": 3, "status_500": 3}


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": "hi"}]}'])
def test_what_is_no_chat_completion_is_asked_for_again(body):
    with FaultServer([answering(body), saying("Final Score: 3")]) as server:
        reward = judge(server)
        assert reward(*batch()).item() == 3
    assert reward.take_counts() == {"invalid": 1, "retried": 1}


def test_a_pattern_has_one_group():
    with pytest.raises(ValueError, match="score_pattern"):
        VLMJudge("http://127.0.0.1:1/v1", "m", score_pattern="(two)(groups)")


def brightest(handler):
    shades = shades_of(handler.body)
    saying(f"Image 1 is better in detail. Image {1 + shades.index(max(shades))} is the best.")(handler)


def compared(images, prompts, rows, compare, plan=()):
    with FaultServer(list(plan), then=brightest) as server:
        reward = judge(server, compare=compare, connection={"max_connections": 1})
        found = reward(images, prompts, rows)
        shown = [shades_of(body) for _, body in server.requests if body]
    return found, shown, reward


def test_all_pairs_of_a_prompt_are_compared_and_each_image_is_first_in_half_of_its_pairs():
    images, prompts, rows = batch(7)
    found, shown, _ = compared(images, prompts, rows, "pairs")
    assert sorted(map(sorted, shown)) == [[10 * i, 10 * j] for i in range(7) for j in range(i + 1, 7)]
    assert {sum(first == 10 * n for first, _ in shown) for n in range(7)} == {3}
    torch.testing.assert_close(found, choice_scores([(i, [i, j]) for i in range(7) for j in range(i)], 7).float())
    turned, again, _ = compared(images.flip(0), prompts, rows, "pairs")
    torch.testing.assert_close(turned, found.flip(0))
    assert sorted(again) == sorted(shown), "the order depends on the order of the images"


def test_the_best_of_a_group_is_chosen_in_one_request():
    images, prompts, rows = batch(4)
    found, shown, _ = compared(images, [*prompts[:3], "other"], rows, "group")
    assert [sorted(shades) for shades in shown] == [[0, 10, 20]]
    torch.testing.assert_close(found[:3], choice_scores([(2, [0, 1, 2])], 3).float())
    assert found[3].isnan(), "an image without another of its prompt"
    pictures = [{"image": "a.png"}, {"image": "a.png"}, {"image": "b.png"}, {"image": "b.png"}]
    found, shown, _ = compared(images, prompts, pictures, "group")
    assert sorted(map(sorted, shown)) == [[0, 10], [20, 30]], "edits of different pictures were compared"
    assert found[0] == found[2] < 0 < found[1] == found[3]


@pytest.mark.parametrize("text", ["Image 3 is better.", "Image 0 is the best.", "Neither.", None])
def test_an_invalid_choice_leaves_out_its_comparison(text):
    found, _, reward = compared(*batch(3), "pairs", [saying(text)])
    assert found.isfinite().all(), "two comparisons are left"
    assert reward.take_counts() == {"unparsable": 1}
    assert reward.failure.startswith("the answer has no valid choice (finish_reason: stop): ")
    found, _, reward = compared(*batch(2), "pairs", [saying(text)])
    assert found.isnan().all()
    assert reward.take_counts() == {"unparsable": 1}
    found, _, _ = compared(*batch(2), "pairs", [saying("Both images are equally good.")])
    assert found.tolist() == [0.0, 0.0]


def test_a_comparing_judge_scores_no_held_out_images_and_in_no_thread():
    comparing, plain = (VLMJudge("http://127.0.0.1:1/v1", "m", name=str(c), compare=c) for c in ("pairs", None))
    assert [(one.compares, one.concurrent) for one in (comparing, plain)] == [(True, False), (False, True)]
    assert Weighted([comparing, plain]).observing(None).weight_of == {"None": 0.5}
