"""The model card of an export: ``README.md``, as model hubs show it, with the lines that load the export."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from torch import nn

from lit_vgrpo.config.recipe import RECIPE_NAME
from lit_vgrpo.config.tree import class_name, expanded
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.errors import one_line, report
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.components import component_folder
from lit_vgrpo.policies.export import lora_calls
from lit_vgrpo.policies.loading import call_parameters, config_folder, read_index
from lit_vgrpo.policies.modular import is_modular, lines_that_load
from lit_vgrpo.policies.trained import block_linears
from lit_vgrpo.report.page import environment
from lit_vgrpo.report.run_data import RunData, read_run
from lit_vgrpo.report.verdict import Verdict
from lit_vgrpo.system.hub import base_name, file_at_hand, local_folder
from lit_vgrpo.system.paths import copy_file, write_atomically
from lit_vgrpo.training.evaluation import evaluation_of, sides_of

CARD_NAME, PICTURE_NAME = "README.md", "before_after.png"
LICENCE_KEYS = ("license", "license_name", "license_link")
MACHINE_LINES = ("name:", "run_dir:", "ckpt_path:", "allow_changes:", "#")
"""Prefixes of lines of ``config.yaml`` that are meaningless to others."""
IN_DIFFUSERS = ("nf4",)
"""Kinds of quantisation whose numbers diffusers computes too."""


def add_card(
    folder: Path,
    run: Path,
    policy: Policy,
    written: Path,
    variant: str,
    iterations: int,
    dtype: torch.dtype = torch.float32,
    merged: bool = False,
    is_whole: bool = True,
    spec: RolloutSpec | None = None,
) -> tuple[str, list[str]]:
    """Write the model card into an export; a failure is only reported, since only the weights matter.

    Args:
        folder: The export, whose weights are written.
        written: Final name of what diffusers loads: folder of a pipeline or an adapter, or file of an adapter.
        variant: Set of weights, ``trained`` or ``EMA``.
        iterations: Iterations after which they were saved.
        merged: True if an adapter was merged into the weights.
        is_whole: False if the weights were saved in the middle of an iteration.
        spec: How the run's evaluation samples; ``None`` reads it from the run's recipe.

    Returns:
        The kind of weights, such as ``LoRA of rank 32, float32``, and the lines of Python that load them.
    """
    is_adapter = policy.lora_rank is not None and not merged
    name, base = str(dtype).removeprefix("torch."), _base(policy)
    what = f"pipeline in {name}{', with the LoRA merged in' if merged else ''}"
    loaded_in = policy.dtype if is_adapter else dtype
    lines = [f"import diffusers, torch{', transformers' if policy.components else ''}"]
    try:
        if policy.quantisation is not None:
            lines += quantised_lines(policy, is_adapter)
        if is_adapter:
            what = f"LoRA of rank {policy.lora_rank}, {name}"
            lines += loading_lines(policy, base, loaded_in)
            for method, options in lora_calls(policy.pipeline, policy.network_names):
                given = [_quoted(written), *(f"{key}={value!r}" for key, value in options.items())]
                lines.append(f"pipe.{method}({', '.join(given)})")
        else:
            lines += loading_lines(policy, f"{written}", loaded_in, folder)
        if loaded_in != policy.decode_dtype:
            lines += vae_lines(policy)
        data = read_run(run)
        lines += sample_lines(policy, spec or evaluation_of(data.recipe))
        is_evaluated, data = is_whole and variant == data.weights, _until(data, iterations)
        # The last evaluation may be of an earlier iteration, and rounded weights were not measured.
        if not is_evaluated or dtype != torch.float32 or [p.iteration for p in data.evaluations][-1:] != [iterations]:
            data = replace(data, evaluations=[])
        picture = run / "samples" / "after.png"
        # The last grid shows the end of training, not an earlier checkpoint.
        has_picture = is_evaluated and picture.is_file() and iterations == data.summary.get("iterations")
        if has_picture:
            copy_file(picture, folder / PICTURE_NAME)
        base_card = file_at_hand(policy.checkpoint, CARD_NAME, policy.revision)
        shared, folders = without_places(lines, policy, written, folder)
        shown: dict[str, Any] = {"what": what, "lines": shared, "variant": variant, "iterations": iterations}
        shown["folders"] = folders
        task = "image-to-image" if policy.edits else "text-to-image" if policy.num_frames is None else "text-to-video"
        shown |= {"base": base_name(policy.checkpoint), "task": task, "has_picture": has_picture}
        if data.config:
            lines_of_all = [line for line in data.config.splitlines() if not line.startswith(MACHINE_LINES)]
            write_atomically(folder / RECIPE_NAME, "\n".join([*lines_of_all, ""]))
        write_atomically(folder / CARD_NAME, card(data, base_card, is_adapter, **shown))
    except Exception as error:  # a card is no reason to lose an export or the end of a run
        report([f"No model card in {written}: {one_line(error) or type(error).__name__}"])
    return what, lines


def without_places(lines: list[str], policy: Policy, written: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Return the lines of Python without the folders of this machine, and what readers replace with theirs."""
    replaced = [f"{written.relative_to(folder.parent)}"] if written.is_relative_to(folder) else []
    names = {f"{written}": name for name in replaced}
    for source in (policy.checkpoint, *policy.components.values()):
        if (place := local_folder(source)) is not None:
            if "/" not in (name := base_name(source)):
                name = f"path/to/{name}"
                replaced.append(name)
            names.setdefault(f"{place}", name)
    text = "\n".join(lines)
    for origin, name in names.items():
        text = text.replace(_quoted(origin), _quoted(name))
    return text.split("\n"), [name for name in dict.fromkeys(replaced) if _quoted(name) in text]


def card(run: RunData, base_card: Path | None, is_adapter: bool, base: str, task: str, **shown: Any) -> str:
    """Return the card's text, with the metadata that hubs read in front.

    Args:
        base_card: The base model's card, if it is on this machine.
        is_adapter: The export is loaded on top of the base model.
        base: Name of the model that training started from.
        task: The hub's name of what the pipeline does.
        shown: Additional values for the template.
    """
    licence = base_licence(base_card)
    relation = "adapter" if is_adapter else "finetune"
    head: dict[str, Any] = {
        "library_name": "diffusers",
        "pipeline_tag": task,
        **({"base_model": base, "base_model_relation": relation} if "/" in base else {}),
        **licence,
        "tags": [task, "reinforcement-learning", "lit-vgrpo", *(["lora"] if is_adapter else [])],
    }
    model = run.recipe.get("model") or {}
    names = run.summary.get("reward_parts_end") or run.reward_names
    classes = dict.fromkeys(rewards_in(model.get("reward")))
    template = environment().get_template("card.md.j2")
    return template.render(
        head=yaml.safe_dump(head, sort_keys=False, allow_unicode=True),
        run=run,
        verdict=Verdict(run),
        base=base,
        edits=task == "image-to-image",
        licence=[word for value in licence.values() for word in (value if isinstance(value, list) else [value])],
        method=Verdict(run).method or "not known",
        rewards=f"{', '.join(names)} ({', '.join(classes)})" if names else ", ".join(classes),
        recipe=RECIPE_NAME if run.config else None,
        **shown,
    )


def rewards_in(node: Any) -> list[str]:
    """Return the classes of a recipe's rewards in order, and the user's functions.

    >>> rewards_in({"class_path": "Weighted", "init_args": {"rewards": ["a.PickScore", {"python": "mine:score"}]}})
    ['PickScore', 'mine:score']
    """
    if isinstance(node := expanded(node), list):
        return [name for part in node for name in rewards_in(part)]
    options = (node.get("init_args") if isinstance(node, dict) else None) or {}
    if "rewards" in options:
        return rewards_in(options["rewards"])
    return [name for name in [str(options.get("function") or class_name(node))] if name]


def base_licence(card: Path | None) -> dict[str, str | list[str]]:
    """Return the licence in a model card's metadata; empty if it has none, or cannot be read, which is reported."""
    try:
        text = card.read_text(encoding="utf-8-sig") if card is not None else ""
        head = (yaml.safe_load(text.split("\n---", 1)[0]) if text.startswith("---\n") else None) or {}
        licence = {key: head[key] for key in LICENCE_KEYS if isinstance(head.get(key), str | list)}
        return {key: value for key, value in licence.items() if all(isinstance(word, str) for word in value)}
    except Exception as error:  # YAML's types raise anything
        why = one_line(error)[:200] or type(error).__name__
        report([f"The base model's licence is not known: {card} cannot be read ({why})."])
        return {}


def _until(run: RunData, iterations: int) -> RunData:
    """Return a run's data up to an iteration; the summary is kept only if that is the last one."""
    if run.num_iterations <= iterations:
        return run
    points = (run.iterations, run.evaluations)
    trained, evaluated = ([point for point in of if point.iteration <= iterations] for of in points)
    return replace(run, summary={}, iterations=trained, evaluations=evaluated)


def loading_lines(policy: Policy, source: str, dtype: torch.dtype, index: Path | None = None) -> list[str]:
    """Return the lines of Python that load a pipeline from a hub name or folder, whose index is in ``index`` so far."""
    import diffusers

    is_start, vae = source == _base(policy), policy.decode_dtype
    types = f"{dtype}" if vae == dtype else f'{{"default": {dtype}, "vae": {vae}}}'
    which = {name: getattr(policy, name) if is_start else None for name in ("variant", "revision")}
    if is_modular(policy.pipeline):
        return lines_that_load(policy.pipeline, _quoted(source), types, **which)
    saved = {} if is_start else read_index(index or Path(source))
    named = [entry[1] for entry in saved.values() if isinstance(entry, list) and entry[0] == "diffusers"]
    if not all(hasattr(diffusers, kind) for kind in named):
        # diffusers 0.42.1 cannot load the pipeline that it saved: PRX's text encoder is of a class without public name.
        networks = {name: type(network).__name__ for name, network in policy.networks().items()}
        options = {name: f'{_quoted(source)}, subfolder="{name}", dtype={dtype}' for name in networks}
        parts = [f"pipe.{name} = diffusers.{kind}.from_pretrained({options[name]})" for name, kind in networks.items()]
        return [*loading_lines(policy, _base(policy), dtype), *parts]
    given = [f"{name}={_quoted(value)}" for name, value in which.items() if value is not None]
    for name in policy.components if is_start else ():
        given.append(component(policy, name, vae if name == "vae" else dtype))
    optional = type(policy.pipeline)._optional_components
    folder = config_folder(policy.checkpoint, policy.revision) if is_start else index
    nulls = policy.null_components(folder or Path(source)).keys() - policy.components.keys()
    given += [f"{name}=None" for name in sorted(nulls) if name not in optional]
    given.append(f"dtype={types}")
    if is_start and policy.quantisation in IN_DIFFUSERS:
        given.append("quantization_config=quantised")
    return [f"pipe = diffusers.DiffusionPipeline.from_pretrained({', '.join([_quoted(source), *given])})"]


def quantised_lines(policy: Policy, is_adapter: bool) -> list[str]:
    """Return the line of Python that quantises the base as the run did, or a comment if that is not possible."""
    kind, mapping = policy.quantisation, []
    elsewhere = is_modular(policy.pipeline) or not policy.components.keys().isdisjoint(policy.network_names)
    if not is_adapter or kind not in IN_DIFFUSERS or elsewhere:
        why = "these lines do not quantise it" if is_adapter else "the LoRA is merged into unquantised weights"
        return [f"# The run's base was in {kind}, and {why}: images differ slightly."]
    for name, network in policy.networks().items():
        quantised, linear = block_linears(network), [n for n, m in network.named_modules() if isinstance(m, nn.Linear)]
        others = [n.removesuffix(".base_layer") for n in linear if n not in quantised and "lora_" not in n]
        options = f'load_in_4bit=True, bnb_4bit_quant_type="{kind}", bnb_4bit_compute_dtype={policy.dtype}'
        mapping.append(f'"{name}": diffusers.BitsAndBytesConfig({options}, llm_int8_skip_modules={others})')
    return [f"quantised = diffusers.PipelineQuantizationConfig(quant_mapping={{{', '.join(mapping)}}})"]


def vae_lines(policy: Policy) -> list[str]:
    """Return the lines of Python with which the VAE computes in ``decode_dtype``, and the rest in the pipeline's."""
    to = f"to({policy.decode_dtype})"
    lines = [
        "decode = pipe.vae.decode",
        f"pipe.vae.decode = lambda z, *args, **named: decode(z.{to}, *args, **named)",
    ]
    if policy.edits:
        encoded = f"encode(x.{to}).latent_dist.mode().to(x.dtype)"
        lines += ["import types", "encode = pipe.vae.encode"]
        lines.append(f"pipe.vae.encode = lambda x: types.SimpleNamespace(latents={encoded})")
    return lines


def component(policy: Policy, name: str, dtype: torch.dtype) -> str:
    """Return the argument of ``from_pretrained`` for a part of the pipeline that comes from another checkpoint."""
    source, kind = policy.components[name], type(getattr(policy.pipeline, name))
    given = [_quoted(local_folder(source) or source)]
    inside, local = component_folder(name, source), local_folder(source)
    if inside != local if local is not None else inside.name == name:
        given.append(f'subfolder="{name}"')
    if issubclass(kind, torch.nn.Module):
        given.append(f"dtype={dtype}")
    return f"{name}={kind.__module__.partition('.')[0]}.{kind.__name__}.from_pretrained({', '.join(given)})"


def sample_lines(policy: Policy, spec: RolloutSpec) -> list[str]:
    """Return the lines of Python that sample as an evaluation with ``spec`` does; a picture to edit is not resized."""
    with policy.sized(*sides_of(spec)):
        height, width = policy.image_size or (1, 1)
        scheduler = policy.scheduler_lines(spec)
    known = call_parameters(policy.pipeline)
    options = policy.pipeline_references(torch.zeros(1, 3, height, width)) if policy.edits else {}
    if is_modular(policy.pipeline) or "height" in known:  # LongCat's edits have their picture's size
        options |= {"height": height, "width": width}
    own = [name for name in ("max_sequence_length", "num_frames") if name in known and getattr(policy, name, None)]
    options |= {name: getattr(policy, name) for name in own}
    options |= {"num_inference_steps": spec.steps, **policy.pipeline_guidance(spec.guidance, 1)}
    options |= policy.pipeline_options
    named = [f"picture_{number + 1}" for number in range(policy.references)]
    shown = "picture" if len(named) == 1 else f"[{', '.join(named)}]"
    picture = [f"image={shown}"] if options.pop("image", None) is not None else []
    given = [f"{name}={value!r}" for name, value in options.items() if not isinstance(value, torch.Tensor)]
    if "negative_prompt_embeds" in options and policy.negative_prompt:  # a pipeline that takes nothing else
        length = f"max_sequence_length={options['max_sequence_length']}"
        given.append(f"negative_prompt_embeds=pipe.encode_prompt({policy.negative_prompt!r}, {length})[0]")
    tiling = ["pipe.vae.enable_tiling()"] if policy.vae_tiling else []
    name, kind = ("frames", "frames") if policy.num_frames is not None else ("image", "images")
    call = ", ".join(['prompt="a prompt"', *picture, *given])
    if is_modular(policy.pipeline):
        return [*scheduler, *tiling, f"{name} = pipe({call}, output={policy.pipeline.result!r})[0]"]
    output = get_args(signature(type(policy.pipeline).__call__).return_annotation)[:1]
    if output and is_dataclass(output[0]):  # of Kandinsky 5's pictures, it is image
        kind = fields(output[0])[0].name
    return [*scheduler, *tiling, f"{name} = pipe({call}).{kind}[0]"]


def _base(policy: Policy) -> str:
    return f"{local_folder(policy.checkpoint) or policy.checkpoint}"


def _quoted(path: object) -> str:
    return json.dumps(f"{path}", ensure_ascii=False)
