"""Small real pipelines for every test; no network, one thread unless ``OMP_NUM_THREADS`` says otherwise."""

import gc
import logging
import os
import signal
import subprocess
import sys
from functools import cache
from threading import Thread

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
from processes import BARE, PLAIN, PYTHON, REAL_PYTHON

sys.executable = REAL_PYTHON  # in a worker, which is a fork, it would be PYTHON

# A shell's background job ignores Ctrl-C, and nohup SIGHUP; tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
gc.disable()  # until all tests are collected
pytest.register_assert_rewrite("policies.contract")  # so that its asserts say what was compared


collect_ignore = ["support"]  # a doctest run would import the pretended GPU a second time

LONGEST_FIRST = (
    *("test_recipes", "test_policies", "test_ranks", "test_export", "test_run", "test_acceleration", "test_resumption"),
    *("test_estimate", "test_checkpoint", "test_methods", "test_evaluate", "test_slotting_in", "test_report_live"),
    *("test_overlays", "test_report", "test_resume", "test_inputs", "test_training", "test_fid", "test_ocr"),
    *(
        "test_chain",
        "test_compare",
        "test_tiny_ocr",
        "test_speed",
        "test_scouting",
        "test_kill_and_resume",
        "test_check",
    ),
    *(
        "test_pretended_gpu",
        "test_keys",
        "test_own_code",
        "test_estimate_room",
        "test_callbacks",
        "test_families",
        "test_family_runs",
    ),
    *("test_quantised", "test_quantised_base", "test_lora_start", "test_custom_optimizer", "test_sample", "test_cli"),
    *("test_best_evaluation", "test_anchor", "test_limits", "test_policies_loading", "test_export_hub"),
    *("test_curriculum", "test_watchdog", "test_multi_node", "test_vote"),  # these wait
)
"""Files that take long: started last, one of them would keep a worker busy while the others have nothing to do."""


def pytest_collection_modifyitems(items):
    """Long files first; of a test with several cases, only the first is traced for coverage, which costs a sixth."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    seen = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if function in seen:
            item.add_marker(pytest.mark.no_cover)
        seen.add(function)


def pytest_collection_finish():
    """Keep garbage collections from looking at every module and test again, and from coming 30 times as often.

    Before, they took a tenth of the tests' time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_configure(config):
    """Let the interpreter's last collection look again: nanobind lists as leaked what is still there."""
    config.add_cleanup(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Fork the workers, each of which would take 10 s to import what is tested; coverage has to see the imports."""
    from execnet import XSpec

    for python in (PLAIN, BARE):  # import what tests need later, while a core is idle
        started = {"args": [python, "-c", ""], "stderr": subprocess.DEVNULL}
        Thread(target=subprocess.run, kwargs=started, daemon=True).start()
    if not getattr(config.option, "cov_source", None):
        specs[:] = [XSpec(f"{spec}//python={PYTHON}") if spec.popen and not spec.python else spec for spec in specs]


@pytest.fixture(scope="session", autouse=True)
def threads():
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session", autouse=True)
def installed_packages():
    """For every trainer, Lightning asks all installed packages for callbacks, which takes 7 ms: ask them once."""
    from lightning.fabric.utilities import registry

    registry.entry_points = cache(registry.entry_points)


@pytest.fixture(scope="session")
def tiny():
    """The builders. Imported here, since the process that hands tests out to workers needs no torch."""
    import tiny_pipelines

    return tiny_pipelines


@pytest.fixture(autouse=True)
def own_signals():
    """A trainer that was interrupted leaves Ctrl-C ignored, which the next test would inherit."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def logged():
    """The records that are logged in a test, as pytest's ``caplog`` has them, which is switched off for its cost."""
    known = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    loggers = [logging.root, *(logger for logger in known if not logger.propagate)]
    records, handler = [], logging.Handler()
    handler.emit = records.append
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture
def forked_python(monkeypatch):
    """Fork what the package starts by ``sys.executable``, so that its imports cost nothing."""
    monkeypatch.setattr(sys, "executable", PYTHON)


@pytest.fixture(autouse=True)
def device():
    """``PRETEND_GPU=1 python -m pytest tests/runs/test_resume.py`` runs tests on a pretended GPU."""
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


@pytest.fixture
def tiny_recipe(tmp_path, monkeypatch, tiny_sd3):
    """A recipe of two iterations, in an empty folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_recipe_of(tiny_sd3))
    return path


def tiny_recipe_of(checkpoint):
    """The text of the same recipe with a pipeline of one's own."""
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
