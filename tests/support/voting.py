"""A voter who looks at the voting page in a headless browser, and is right in four of five votes."""

import random
import shutil
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO

import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from lit_vgrpo.rewards import ShapesReward

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_BROWSER = (
    "needs chromium on the PATH and pip install playwright" if None in (CHROMIUM, find_spec("playwright")) else None
)
IDLE = "body:not([aria-busy])"


@contextmanager
def browser(**options):
    """A browser page without access to other machines, and what its console said."""
    from playwright.sync_api import sync_playwright

    outside = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with sync_playwright() as tools:
        chromium = tools.chromium.launch(executable_path=CHROMIUM, args=outside)
        page = chromium.new_page(**options)
        complaints = []
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page, complaints
        chromium.close()


def enter(page, address, name):
    """Open the page and give a name."""
    page.goto(address)
    page.fill("#voter", name)
    page.keyboard.press("Enter")


class NoisyVoter:
    """Chooses an image that satisfies most of a shapes prompt, or with the chance ``noise`` one that does not.

    It skips images that are all equally good. The draws depend on the seed alone.
    """

    def __init__(self, seed, noise=0.2):
        self.draw = random.Random(seed)
        self.noise = noise
        self.judge = ShapesReward()

    def choose(self, prompt, pngs):
        """Return the number of the chosen image, or None to skip."""
        images = torch.stack([pil_to_tensor(Image.open(BytesIO(png))) for png in pngs]).float() / 255
        scores = self.judge(images, [prompt] * len(pngs), [{}] * len(pngs)).tolist()
        best = [place for place, score in enumerate(scores) if score == max(scores)]
        worse = [place for place in range(len(scores)) if place not in best]
        if not worse:
            return None
        return self.draw.choice(worse if self.draw.random() < self.noise else best)

    def vote(self, page):
        """Look at what the page shows, and press a key; returns False if there is nothing to compare."""
        page.wait_for_selector(IDLE, state="attached")
        seen = page.evaluate(
            "() => document.querySelector('#ballot').hidden ? null : [document.querySelector('#prompt').textContent,"
            " [...document.querySelectorAll('#images button:not([hidden]) img')].map((image) => image.src)]"
        )
        if seen is None:
            return False
        prompt, sources = seen
        chosen = self.choose(prompt, [page.request.get(source).body() for source in sources])
        with page.expect_response("**/vote") as answer:
            page.keyboard.press("s" if chosen is None else str(chosen + 1))
        assert answer.value.ok, answer.value.text()
        return True
