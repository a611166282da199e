"""Lightning callbacks, one class per file."""

from lit_vgrpo.callbacks.benchmark import Benchmark
from lit_vgrpo.callbacks.collapse import CollapseStop
from lit_vgrpo.callbacks.diagnostics import SurrogateDiagnostics
from lit_vgrpo.callbacks.ema import EMA
from lit_vgrpo.callbacks.export import Export
from lit_vgrpo.callbacks.fid import FID
from lit_vgrpo.callbacks.hack_alarm import RewardHackAlarm
from lit_vgrpo.callbacks.progress import ProgressBar
from lit_vgrpo.callbacks.report import Report
from lit_vgrpo.callbacks.reward_logger import RewardLogger
from lit_vgrpo.callbacks.samples import SampleGrid
from lit_vgrpo.callbacks.summary import RunSummary
from lit_vgrpo.training.saved_weights import averaged_weights

__all__ = [
    "EMA",
    "FID",
    "Benchmark",
    "CollapseStop",
    "Export",
    "ProgressBar",
    "Report",
    "RewardHackAlarm",
    "RewardLogger",
    "RunSummary",
    "SampleGrid",
    "SurrogateDiagnostics",
    "averaged_weights",
]
