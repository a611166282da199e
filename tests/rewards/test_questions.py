import base64
import io
import json
import math

import pytest
import torch
from fault_server import FaultServer, answering, choosing
from PIL import Image

from lit_vgrpo.rewards import Connection, HTTPReward, QuestionScore, RecolourReward
from lit_vgrpo.rewards.base import called
from lit_vgrpo.rewards.judges import PackagedJudge
from lit_vgrpo.system.hub import LoadError

IMAGES = torch.arange(2).view(-1, 1, 1, 1).expand(-1, 3, 4, 4) / 1.0


def reward(server, **options):
    connection = Connection(retries=0, backoff_s=0.0, max_connections=1)
    return QuestionScore(f"{server.address}/v1", "judge", connection=connection, **options)


def asked(server):
    bodies = [json.loads(body) for _, body in server.requests if body]
    return [body["messages"][0]["content"] for body in bodies], bodies[0]


def colour_of(part):
    return Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2]))).getpixel((0, 0))


def test_the_probability_is_that_of_all_spellings():
    rows = [{"vqa_list": [["How many?", "two"], ["A cat?", "Yes"]]}, {"vqa_list": [["A dog?", "Yes"]]}]
    plan = [choosing(two=0.2, _2=0.1, Two=0.2, no=0.5), choosing(yes=0.5, No=0.5), choosing(No=0.75, maybe=0.25)]
    with FaultServer(plan) as server:
        found = reward(server)(IMAGES, ["p", "q"], rows)
        contents, body = asked(server)
    # an unlisted answer is at most as probable as the last listed one
    assert found.tolist() == pytest.approx([0.5, 0.25])
    assert [content[-1]["text"] for content in contents] == [
        f"{q} Answer in one word." for q in ("How many?", "A cat?", "A dog?")
    ]
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (1, True, 20)


def test_the_geometric_mean_is_low_if_one_answer_is():
    rows = [{"vqa_list": [["A?", "Yes"], ["B?", "Yes"]]}]
    for mean, expected in (("geometric", 0.4), ("arithmetic", 0.5)):
        with FaultServer([choosing(Yes=0.8, No=0.2), choosing(Yes=0.2, No=0.8)]) as server:
            assert reward(server, mean=mean)(IMAGES[:1], ["p"], rows).item() == pytest.approx(expected)


def test_a_prompt_without_questions_is_asked_as_a_whole_after_its_picture(tmp_path):
    Image.new("RGB", (4, 4), (0, 0, 255)).save(tmp_path / "a.png")
    rows = [{"prompt": "x", "image": str(tmp_path / "a.png")}]
    with FaultServer(then=choosing(Yes=0.9, No=0.1)) as server:
        found = called(reward(server, question="From {prompt}?"), IMAGES[:1], ["x"], rows)
        ((picture, image, text),), _ = asked(server)
    assert found.item() == pytest.approx(0.9)
    assert text["text"] == "From x? Answer in one word."
    assert [colour_of(part) for part in (picture, image)] == [(0, 0, 255), (0, 0, 0)]


def test_several_pictures_of_a_prompt_are_shown_in_order_or_refused_before_a_rollout(tmp_path):
    for grey in (10, 20):
        Image.new("RGB", (4, 4), (grey, grey, grey)).save(tmp_path / f"{grey}.png")
    row = {"prompt": "make it red", "image": [str(tmp_path / f"{grey}.png") for grey in (10, 20)]}
    with FaultServer(then=choosing(Yes=0.9, No=0.1)) as server:
        scores = called(reward(server), IMAGES[:1].expand(2, -1, -1, -1), ["x", "x"], [row, row])
        assert [[colour_of(part)[0] for part in parts[:-1]] for parts in asked(server)[0]] == [[10, 20, 0]] * 2
    assert scores.tolist() == pytest.approx([0.9, 0.9])
    takes_one = [HTTPReward("http://a/b", send_pictures=True), PackagedJudge("EditReward"), RecolourReward()]
    for one in takes_one:
        assert "has 2 pictures to edit, but the reward takes one" in one.prompt_error("make it red", row)
        assert one.prompt_error("make it red", {**row, "image": row["image"][0]}) is None
    assert HTTPReward("http://a/b").prompt_error("make it red", row) is None


NUMBER = b'{"choices": [{"logprobs": {"content": [{"top_logprobs": [{"token": "yes", "logprob": %b}]}]}}]}'


@pytest.mark.parametrize(
    ("answer", "cause", "said"),
    [
        (answering({}, 400), "status_400", "status 400"),
        (answering(b"[" * 100_000), "invalid", "invalid response"),
        (answering(b'{"choices": "x"}'), "invalid", "no log-probabilities"),
        *((answering(NUMBER % text), "invalid", "log-prob") for text in (b"NaN", b"1000", b"[]", b"9" * 400)),
    ],
)
def test_a_question_without_log_probabilities_fails_its_image_only(answer, cause, said):
    with FaultServer([answer, choosing(Yes=0.5, No=0.5)]) as server:
        one = reward(server)
        found = one(IMAGES, ["x", "y"], [{}, {}])
    assert math.isnan(found[0])
    assert found[1].item() == pytest.approx(0.5)
    assert one.take_counts() == {cause: 1, "gave_up": 1}
    assert said in one.failure


def unending(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    handler.server.owner.closing.wait(60)


def test_a_server_that_does_not_answer_is_found_before_sampling():
    for page in ((200, b"{}"), unending):
        with FaultServer(pages={"/v1/models": page, "/v1/models?key=hunter2": page}) as server:
            reward(server).load()
            keyed = QuestionScore(f"http://me:hunter2@{server.address[7:]}/v1/?key=hunter2", "judge")
            keyed.load()
    with pytest.raises(LoadError, match="does not answer .* Run: pip install vllm && vllm serve judge, or set "):
        reward(server).load()
    with FaultServer() as server, pytest.raises(LoadError, match=r"does not answer \(status 404\)") as raised:
        QuestionScore(f"http://me:hunter2@{server.address[7:]}/v1?key=hunter2", "judge").load()
    assert "hunter2" not in str(raised.value)
