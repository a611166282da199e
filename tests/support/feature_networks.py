"""Small feature networks and pictures, for FID."""

import io
import warnings

import numpy as np
import torch
from PIL import Image
from torch import nn


class SmallNetwork(nn.Module):
    """A few features of pixels in [0, 255]."""

    def __init__(self, features=6):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 5, stride=4)
        self.head = nn.Linear(4 * 16, features)

    def forward(self, x):
        hidden = nn.functional.adaptive_avg_pool2d(torch.tanh(self.conv(x / 64)), (4, 4))
        return 10 * self.head(hidden.flatten(1))


def small_network():
    """Return a :class:`SmallNetwork`, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return SmallNetwork().eval()


def save_script(network, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.jit.save(torch.jit.script(network.eval()), str(path))
    return path


def pictures(seed, count, darkest=0):
    """Smooth pictures of two sizes, as PNG files' bytes."""
    random = np.random.default_rng(seed)
    files = []
    for index in range(count):
        coarse = Image.fromarray(random.integers(darkest, 256, (4, 4, 3), dtype=np.uint8))
        stream = io.BytesIO()
        coarse.resize((40, 32 + 8 * (index % 2)), Image.Resampling.BICUBIC).save(stream, "PNG")
        files.append(stream.getvalue())
    return files
