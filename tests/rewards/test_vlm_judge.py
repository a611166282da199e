import json

import fault_server as errors
import numpy as np
import pytest
import torch
from fault_server import FaultServer, answering

from lit_vgrpo.rewards import Connection, VLMJudge


def judge(server, **options):
    patience = {"timeout_s": 20, "retries": 1, "backoff_s": 0.0, **options.pop("connection", {})}
    return VLMJudge(f"{server.address}/v1", model="judge-7b", connection=Connection(**patience), **options)


def saying(text, finish="stop"):
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return answering({"id": "1", "object": "chat.completion", "choices": [choice]})


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
        ("Final Score: 5. On second thoughts.\nFinal Score: 1.25", 1.25),
    ],
)
def test_the_last_score_of_the_answer_counts(text, expected):
    assert score(text) == (expected, {}, None)


@pytest.mark.parametrize("text", ["I would\nrather not say.", None, "Final Score: 10"])
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
        picture, question = body.pop("messages")[0]["content"]
        assert body == {"model": "judge-7b", "temperature": 1.0, "seed": 0, "max_tokens": 1024, "top_p": 0.5}
        assert question["text"] == 'Is {place} {0} in it? Answer {"score": 1} to {"score": 5}.'
        kind, data = picture["image_url"]["url"].split(",", 1)
        assert kind == "data:image/png;base64"
        (mean,) = errors.pixel_means(json.dumps({"images": [data]}).encode())
        assert round(mean * 255) == 10 * number, "another image's picture was sent"


def test_scores_keep_the_order_of_the_images():
    def by_brightness(handler):
        data = json.loads(handler.body)["messages"][0]["content"][0]["image_url"]["url"].split(",", 1)[1]
        (mean,) = errors.pixel_means(json.dumps({"images": [data]}).encode())
        saying(f"Final Score: {1 + mean}")(handler)

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


@pytest.mark.parametrize(
    "options",
    [{"score_pattern": "(two)(groups)"}, {"max_tokens": 0}, {"temperature": -1.0}],
)
def test_arguments_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        VLMJudge("http://127.0.0.1:1/v1", "m", **options)
