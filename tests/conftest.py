"""Small real pipelines for every test; no network, one thread unless ``OMP_NUM_THREADS`` says otherwise."""

import logging
import os
import signal
from functools import cache

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

# A shell's background job ignores Ctrl-C, and nohup SIGHUP; tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
pytest.register_assert_rewrite("policies.contract")  # so that its asserts print what was compared


collect_ignore = ["support"]  # a doctest run would import the pretended GPU a second time


@pytest.fixture(scope="session")
def tiny():
    """The builders, imported here: the process that hands tests out to workers needs no torch."""
    import tiny_pipelines

    return tiny_pipelines


@pytest.fixture(autouse=True)
def own_signals():
    """A trainer that was interrupted leaves Ctrl-C ignored, which the next test would inherit."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def own_seed():
    """A recipe that was built in this process leaves its seed in the environment, as Lightning does."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.fixture
def logged(caplog):
    """The records that are logged in a test, also by loggers that do not propagate, such as Lightning's."""
    known = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    silent = [logger for logger in known if not logger.propagate]
    for logger in silent:
        logger.addHandler(caplog.handler)
    yield caplog.records
    for logger in silent:
        logger.removeHandler(caplog.handler)


@pytest.fixture(autouse=True)
def device():
    """``PRETEND_GPU=1 python -m pytest tests/test_resume.py`` runs tests on a pretended GPU."""
    if os.environ.get("PRETEND_GPU"):
        from support.pretended_gpu import pretended_gpu

        with pretended_gpu():
            yield
    else:
        yield


@pytest.fixture(scope="session")
def sd3_folder(tmp_path_factory, tiny):
    """``sd3_folder(t5=False)``: a random small StableDiffusion3Pipeline folder."""
    made = cache(lambda t5: tiny.build_sd3(tmp_path_factory.mktemp("sd3"), small=True, t5=t5, shift=3.0 if t5 else 1.0))
    return lambda t5=False: made(t5)


@pytest.fixture(scope="session")
def unet_folder(tmp_path_factory, tiny):
    """``unet_folder("epsilon")``: a random small StableDiffusionPipeline folder."""
    made = cache(lambda kind: tiny.build_unet(tmp_path_factory.mktemp("unet"), small=True, prediction_type=kind))
    return lambda prediction="epsilon": made(prediction)


@pytest.fixture(scope="session")
def sdxl_folder(tmp_path_factory, tiny):
    """``sdxl_folder("epsilon")``: a random small StableDiffusionXLPipeline folder."""
    made = cache(lambda kind: tiny.build_sdxl(tmp_path_factory.mktemp("sdxl"), small=True, prediction_type=kind))
    return lambda prediction="epsilon": made(prediction)


@pytest.fixture(scope="session")
def flux_folder(tmp_path_factory, tiny):
    """``flux_folder(guidance_embeds=True)``: a random small FluxPipeline folder; use it with a height and a width."""

    @cache
    def made(embeds, edits):
        folder = tmp_path_factory.mktemp("flux")
        return tiny.build_flux(folder, small=True, guidance_embeds=embeds, edits=edits)

    return lambda guidance_embeds=True, edits=False: made(guidance_embeds, edits)


@pytest.fixture(scope="session")
def large_folder(tmp_path_factory):
    """``large_folder("qwen_image")``: a random small folder of one of ``tools/tiny_large_models.py``'s families."""
    import tiny_large_models
    from helpers import SMALL_PICTURES

    exec("\n".join(SMALL_PICTURES), {})
    return cache(lambda name: getattr(tiny_large_models, f"build_{name}")(tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def tiny_sd3(sd3_folder):
    return sd3_folder()


@pytest.fixture(scope="session")
def tiny_unet(unet_folder):
    return unet_folder()


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory, tiny):
    """A random small CLIPModel folder with its processor."""
    return tiny.build_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="session")
def script(tmp_path_factory):
    """A feature network for FID."""
    from feature_networks import save_script, small_network

    return str(save_script(small_network(), tmp_path_factory.mktemp("network") / "small.pt"))


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """A folder of pictures for FID."""
    from feature_networks import pictures

    folder = tmp_path_factory.mktemp("real")
    for index, data in enumerate(pictures(0, 11)):
        (folder / f"{index}.png").write_bytes(data)
    return str(folder)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny_recipe(here, tiny_sd3):
    """A recipe of two iterations, in an empty folder that is the working directory."""
    path = here / "tiny.yaml"
    path.write_text(tiny_recipe_of(tiny_sd3))
    return path


def tiny_recipe_of(checkpoint):
    """The text of the same recipe with a given pipeline."""
    from helpers import prompt_file

    recipe = TINY_RECIPE.replace("CHECKPOINT", str(checkpoint))
    for kind in ("train", "heldout"):
        recipe = recipe.replace(kind.upper(), prompt_file(f"shapes_{kind}.jsonl"))
    return recipe


TINY_RECIPE = """
seed_everything: 7
trainer: {max_epochs: 2, accelerator: cpu, devices: 1}
model:
  policy: {class_path: SD3Policy, init_args: {checkpoint: CHECKPOINT, max_sequence_length: 1}}
  objective: {class_path: VGRPO, init_args: {num_mc_samples: 2, rollout: {steps: 2}}}
  reward: JPEGCompressibility
data:
  train: TRAIN
  heldout: HELDOUT
  heldout_limit: 2
  prompts_per_iteration: 2
  group_size: 2
  micro_batch_size: ${data.group_size}
"""
