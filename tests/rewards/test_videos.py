"""Rewards of videos: frame by frame, on some frames, and as a whole."""

import numpy as np
import pytest
import torch
from make_tiny_motion import render
from PIL import Image
from tiny_prompts import motion_prompt, motion_rows

from lit_vgrpo.cli.sample import write_frames
from lit_vgrpo.core.pixels import strips, to_uint8
from lit_vgrpo.rewards import Frames, JPEGCompressibility, MotionReward, PythonReward, RewardOutage, Weighted
from lit_vgrpo.tiny.shapes import MOTION_CHOICES

VIDEOS = torch.rand(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
GIVEN = (VIDEOS, ["a", "b"], [{}, {}])


def brightness(images, prompts):
    assert len(prompts) == len(images)
    return images.flatten(1).mean(1)


@pytest.mark.parametrize(
    ("reward", "frames"),
    [(brightness, slice(None)), (Frames(brightness), slice(1)), (Frames(brightness, every=2), slice(0, None, 2))],
)
def test_the_score_is_the_mean_over_the_frames(reward, frames):
    rounded = (VIDEOS * 255).round() / 255
    expected = rounded[:, frames].mean((1, 2, 3, 4))
    torch.testing.assert_close(Weighted([reward]).score(*GIVEN).total, expected)


def test_the_gradient_reaches_the_scored_frames():
    reward, videos = Frames(PythonReward(brightness, differentiable=True), every=3), VIDEOS.clone().requires_grad_()
    assert reward.differentiable
    reward.with_gradient(videos, *GIVEN[1:]).sum().backward()
    assert videos.grad.flatten(2).any(2).tolist() == [[True, False, False, True]] * 2


def test_a_frame_that_fails_fails_its_video():
    broken = VIDEOS.clone()
    broken[1, 2, 0, 0, 0] = torch.nan
    scores = Weighted([JPEGCompressibility()]).score(broken, *GIVEN[1:])
    assert scores.total.isnan().tolist() == [False, True]


def test_a_function_of_videos_gets_them_whole():
    def shape(videos, prompts):
        return [float(video.shape[0]) for video in videos]

    assert Weighted([PythonReward(shape, videos=True)]).score(*GIVEN).total.tolist() == [4.0, 4.0]


def test_a_reward_of_videos_refuses_images():
    with pytest.raises(RewardOutage, match="scores videos, and the policy makes images"):
        Weighted([MotionReward()]).score(VIDEOS[:, 0], *GIVEN[1:])


def test_a_strip_has_the_frames_side_by_side():
    assert torch.equal(strips(VIDEOS)[..., 8:16], VIDEOS[:, 1])
    assert torch.equal(strips(VIDEOS[:, 0]), VIDEOS[:, 0])


def test_rendered_videos_pass_and_others_do_not():
    rows = [row for some in motion_rows() for row in some]
    generator = torch.Generator().manual_seed(0)
    videos = torch.stack([render(row["colour"], row["shape"], row["motion"], generator) for row in rows])
    prompts, blank = [row["prompt"] for row in rows], [{}] * len(rows)
    assert MotionReward()(videos, prompts, blank).eq(1).all()
    assert MotionReward("motion")(videos.flip(1), prompts, blank).eq(0).all()
    assert MotionReward("motion")(videos[:, :1].expand_as(videos), prompts, blank).eq(0).all()
    for name, values in MOTION_CHOICES.items():
        others = [row | {name: values[values.index(row[name]) - 1]} for row in rows]
        wrong = [motion_prompt(*map(row.get, MOTION_CHOICES)) for row in others]
        torch.testing.assert_close(MotionReward()(videos, wrong, blank), torch.full((len(rows),), 2 / 3))
    videos[:, 2] = render("red", "circle", "up", generator)[0, :, :1, :1]
    assert MotionReward()(videos, prompts, blank).eq(0).all()


def test_an_unknown_prompt_is_no_zero():
    assert MotionReward()(VIDEOS[:1], ["a dog"], [{}]).isnan().all()
    assert "must name one colour" in MotionReward().prompt_error("a dog", {})


def test_a_video_file_holds_every_frame(tmp_path):
    write_frames(VIDEOS[0], tmp_path / "video.webp", frames_per_second=16)
    with Image.open(tmp_path / "video.webp") as file:
        for number in range(file.n_frames):
            file.seek(number)
            frame = torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)
            assert torch.equal(frame, to_uint8(VIDEOS[0, number]))
        assert file.n_frames == 4


def test_an_mp4_file_has_the_rate_and_an_odd_size_is_not_rescaled(tmp_path):
    imageio = pytest.importorskip("imageio", reason="needs the extra video")
    pytest.importorskip("imageio_ffmpeg", reason="needs the extra video")
    down, right = torch.meshgrid(torch.linspace(0, 1, 45), torch.linspace(0, 1, 61), indexing="ij")
    video = torch.stack([torch.stack([down, right, torch.full_like(down, frame / 4)]) for frame in range(5)])
    write_frames(video, tmp_path / "video.mp4", frames_per_second=16)
    with imageio.get_reader(tmp_path / "video.mp4") as file:
        assert file.get_meta_data()["fps"] == 16
        found = torch.stack([torch.from_numpy(np.array(frame)) for frame in file]).permute(0, 3, 1, 2)
    assert found.shape == (5, 3, 46, 62)
    difference = (found[..., :45, :61].float() - 255 * video).abs()
    assert difference.mean() < 2
    assert difference.max() < 12
    assert list(tmp_path.iterdir()) == [tmp_path / "video.mp4"]
