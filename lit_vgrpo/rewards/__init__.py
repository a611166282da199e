"""Rewards: plain callables on images and prompts, usable without any trainer."""

from lit_vgrpo.rewards.base import Reward, RewardError, RewardOutage, Scores
from lit_vgrpo.rewards.clip import AestheticScore, CLIPImageSimilarity, CLIPScore, PickScore
from lit_vgrpo.rewards.combine import Weighted, as_weighted
from lit_vgrpo.rewards.connection import Connection
from lit_vgrpo.rewards.frames import Frames
from lit_vgrpo.rewards.function import PythonReward
from lit_vgrpo.rewards.geneval import GenEval
from lit_vgrpo.rewards.hps import HPSv2
from lit_vgrpo.rewards.http import HTTPReward
from lit_vgrpo.rewards.image_reward import ImageReward
from lit_vgrpo.rewards.jpeg import JPEGCompressibility, JPEGIncompressibility
from lit_vgrpo.rewards.judges import PackagedJudge
from lit_vgrpo.rewards.ocr import OCRReward
from lit_vgrpo.rewards.questions import QuestionScore
from lit_vgrpo.rewards.score_queue import ScoreQueue
from lit_vgrpo.rewards.shapes import MotionReward, RecolourReward, ShapesReward, SmoothShapesReward
from lit_vgrpo.rewards.vlm_judge import VLMJudge
from lit_vgrpo.rewards.vote import VoteReward

__all__ = [
    "AestheticScore",
    "CLIPImageSimilarity",
    "CLIPScore",
    "Connection",
    "Frames",
    "GenEval",
    "HPSv2",
    "HTTPReward",
    "ImageReward",
    "JPEGCompressibility",
    "JPEGIncompressibility",
    "MotionReward",
    "OCRReward",
    "PackagedJudge",
    "PickScore",
    "PythonReward",
    "QuestionScore",
    "RecolourReward",
    "Reward",
    "RewardError",
    "RewardOutage",
    "ScoreQueue",
    "Scores",
    "ShapesReward",
    "SmoothShapesReward",
    "VLMJudge",
    "VoteReward",
    "Weighted",
    "as_weighted",
]
