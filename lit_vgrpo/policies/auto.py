"""Any pipeline of diffusers as a policy, learned from watched calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_vgrpo.core.noise import unit_noise
from lit_vgrpo.core.pixels import to_pil
from lit_vgrpo.core.probability_paths import ProbabilityPath, RectifiedFlow, VariancePreserving
from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.solvers import FLOW_SDES, VP_SDES
from lit_vgrpo.core.types import SIZE_OF, Conditioning, RolloutSpec
from lit_vgrpo.errors import one_line
from lit_vgrpo.policies.base import Policy, PutStart
from lit_vgrpo.policies.flow import FLOW_SOLVERS, OWN_TIMESTEPS, euler_like, flow_scheduler, flow_scheduler_misfit, like
from lit_vgrpo.policies.learned import (
    BESIDE,
    Leaf,
    Learned,
    as_tensor,
    before_shift,
    built,
    guided,
    values_at,
)
from lit_vgrpo.policies.learner import WORDS, Learner, number_of
from lit_vgrpo.policies.loading import (
    COMPONENTS,
    INDEX,
    KEY,
    SCHEDULER,
    call_parameters,
    config_folder,
    find_pipeline_class,
    read_index,
    small_file,
)
from lit_vgrpo.policies.meta import NotEstimated
from lit_vgrpo.policies.modular import as_pipeline, has_modular_index, part_folder
from lit_vgrpo.policies.placement import waiting
from lit_vgrpo.policies.trained import is_target, name_in_block
from lit_vgrpo.policies.unet import PREDICTIONS, SNR_SHIFT, VP_SOLVERS, vp_misfit, vp_scheduler
from lit_vgrpo.policies.watching import (
    GUIDER,
    Call,
    NotLearned,
    Watcher,
    guider_options,
    guiders_at,
    omitted_by_checkpointing,
    prediction_of,
    stacked,
    to_meta,
)
from lit_vgrpo.system.hub import LoadError, download_command, headers_only

NETWORKS = ("transformer", "unet")
PROOF, PROOF_SCALE, PROOF_STEPS = 'three blue cubes and a small yellow cat that holds "a sign"', 4.0, 8
"""The call that proves what was learned."""
ROUNDING, ROUNDING_16 = 1e-4, 2e-2
"""Largest differences in the proof, relative to the largest value: in float32, and of text encoders in 16 bits."""
NEGATIVE = "reference_negative."
"""Prefix of the negative prompt's values that depend on a picture."""
OWN_SOLVERS = {"DPMSolverMultistepScheduler": "dpm++", "UniPCMultistepScheduler": "unipc"}
POLICY, ROLLOUT = "Set model.policy.{}", "Set model.objective.rollout.{}"
OTHER_OPTIONS = {
    **{name: POLICY.format(name) for name in ("height", "width", "num_frames", "negative_prompt")},
    **{name: POLICY.format("references") for name in ("image", "images")},
    **{name: ROLLOUT.format("guidance") for name in ("guidance_scale", "true_cfg_scale")},
    **{name: ROLLOUT.format("steps") for name in ("num_inference_steps", "sigmas", "timesteps")},
    **dict.fromkeys(("prompt", "prompt_embeds", "latents", "generator", "output_type", "return_dict"), ""),
    **dict.fromkeys(("num_images_per_prompt", "num_videos_per_prompt"), "Set data.group_size"),
    "eta": ROLLOUT.format("noise_level"),
}
"""Arguments of a pipeline's call that the policy sets itself, and what to do instead."""
LONG, SAME_MIDDLE = 100, 0.02
"""Steps at which the times of two solvers are compared, and the largest difference of their middle times."""
FIXED_SIZE: dict[str, Any] = {"use_resolution_binning": False, "_auto_resize": False}
"""Arguments with which a pipeline's call keeps the size that it is given."""


@checked
class AutoPolicy(Policy):
    """A diffusers pipeline of any class as a policy.

    Loading watches a few calls of the pipeline, in which its network and its VAE are replaced, and learns what they
    get: the latents' layout, the time, the prediction's sign, the conditioning and the rule of guidance. It then
    compares everything that the policy passes them with the pipeline, for another prompt, and stops if something
    differs. The network itself does not run.

    Args:
        checkpoint: A hub name, a local pipeline folder, or a loaded pipeline.
        call: Arguments for the pipeline's call, such as ``{max_sequence_length: 256}``.
        references: Pictures that each prompt edits, passed as ``image``; 0 for a pipeline that needs none.
        num_frames: Frames per video, for a pipeline that makes videos.
        **options: See :class:`~lit_vgrpo.policies.base.Policy`.
    """

    default_lora_targets: ClassVar[tuple[str, ...]] = ()
    pipeline_takes_one: ClassVar[bool] = True  # in some pipelines, a batch's padding changes an image
    may_lack: ClassVar[tuple[str, ...]] = ("processor", "text_encoder", *(f"text_encoder_{n}" for n in (2, 3, 4)))

    def __init__(
        self,
        checkpoint: str,
        call: dict[str, Any] | None = None,
        references: Annotated[int, Range(0, 8)] = 0,
        num_frames: Annotated[int, Range(1, 1001)] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(checkpoint, **options)
        self.given = as_pipeline(self.given)
        self.call, self.references, self.num_frames = dict(call or {}), references, num_frames
        self._files: dict[str, dict[str, Any]] = {}
        self._learned: dict[tuple[Any, ...], Learned] = {}
        self._watcher: Watcher | None = None
        self._pictures: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._schedules: dict[tuple[Any, ...], dict[str, Any]] = {}

    # --- known from the pipeline's files ----------------------------------------------------------------------------

    @property
    def path_kind(self) -> Literal["flow", "vp"]:  # type: ignore[override]
        return "vp" if (config := self._file(SCHEDULER)) and not is_flow(config) else "flow"

    @property
    def sde_solvers(self) -> tuple[str, ...]:  # type: ignore[override]
        return FLOW_SDES if self.path_kind == "flow" else VP_SDES

    @property
    def edits(self) -> bool:  # type: ignore[override]
        return self.references > 0

    @property
    def pipeline_options(self) -> dict[str, Any]:  # type: ignore[override]
        known = self.watcher.parameters
        return {name: value for name, value in self._arguments().items() if name in known}

    @property
    def frames_per_second(self) -> int:
        """Rate of the videos, by the pipeline's own argument for it; 16 if it has none."""
        known = self.watcher.parameters
        name = next((name for name in ("frame_rate", "fps") if name in known), "")
        return int(self.call.get(name) or (known[name].default if name else 0) or 16)

    def _file(self, name: str) -> dict[str, Any]:
        """Return one of the pipeline's configurations; empty if it is unavailable."""
        pipeline = self.pipeline or self.given
        if pipeline is not None:
            part = pipeline if name == INDEX else pipeline.scheduler
            return {"_class_name": type(part).__name__, **dict(part.config)}
        if name not in self._files:  # asked once, also if it is unavailable
            self._files[name] = {}
            with suppress(ValueError, LoadError):  # a damaged file, which loading reports
                self._files[name] = self._read(name)
        return self._files[name]

    def _read(self, name: str) -> dict[str, Any]:
        if name == INDEX:
            find_pipeline_class(self.checkpoint, self.revision, variant=self.variant)  # downloads it
            folder = config_folder(self.checkpoint, self.revision)
            return {} if folder is None else read_index(folder)
        folder, path = config_folder(self.checkpoint, self.revision), None
        if folder is not None and has_modular_index(folder):
            part, _, file = name.rpartition("/")
            with suppress(Exception), headers_only():  # the hub cannot be asked
                path = part_folder(folder, part, self.checkpoint, self.revision) / file
        else:
            path = small_file(self.checkpoint, name, self.revision)
        return dict(json.loads(path.read_text())) if path is not None and path.is_file() else {}

    @property
    def pipeline_class(self) -> str:  # type: ignore[override]
        pipeline = self.pipeline or self.given
        if pipeline is not None:
            return type(pipeline).__name__
        name = find_pipeline_class(self.checkpoint, self.revision, variant=self.variant)
        if name is None:
            raise LoadError(
                f"{KEY}={self.checkpoint} has no {INDEX} on this machine. Run: "
                + download_command(self.checkpoint, INDEX, self.revision, self.variant)
            )
        import diffusers

        if not hasattr(diffusers, name):
            raise LoadError(f"{KEY}={self.checkpoint} is a {name}, which diffusers does not have.")
        return name

    @property
    def network_names(self) -> tuple[str, ...]:
        second = f"{self.network_name}_2"
        return (self.network_name, *([second] if self._file(INDEX).get(second, [None])[0] is not None else []))

    @property
    def network_name(self) -> str:  # type: ignore[override]
        index = self._file(INDEX)
        return next((name for name in NETWORKS if index.get(name, [None])[0] is not None), NETWORKS[0])

    @property
    def solvers(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.path_kind == "vp":
            return VP_SOLVERS[:1] if SNR_SHIFT in self._file(SCHEDULER) else VP_SOLVERS
        own = OWN_SOLVERS.get(self._file(SCHEDULER).get("_class_name", ""), FLOW_SOLVERS[0])
        return (own, *(solver for solver in FLOW_SOLVERS if solver != own))

    def null_components(self, folder: Path) -> dict[str, None]:
        index = read_index(folder)
        spared = index.keys() & {"safety_checker", "feature_extractor"} if "safety_checker" in index else ()
        return {**super().null_components(folder), **dict.fromkeys(spared)}

    # --- loading ----------------------------------------------------------------------------------------------------

    def misfit(self, pipeline: Any) -> str | None:
        if getattr(pipeline, "vae", None) is None:
            return "has no vae. Use the policy class of its family, if there is one."
        others = [*self.network_names[1:]] if pipeline.config.get("boundary_ratio") is None else []
        if any(getattr(pipeline, name, None) is not None for name in (*others, "unconditional_transformer")):
            return "has a second network. Use the policy class of its family, if there is one."
        network = getattr(pipeline, self.network_name)
        if self.lora_rank is not None and not hasattr(network, "add_adapter"):
            return f"has a {type(network).__name__} without adapters. Leave out model.policy.lora_rank."
        known = call_parameters(pipeline).keys()
        if not {"prompt", "num_inference_steps", "output_type"} <= known:
            needed = "prompt, num_inference_steps and output_type"
            return f"has a call without {needed}. Write a policy class for it (docs/add_a_policy.md)."
        for name in sorted(self.call):
            if name not in known:
                return f"takes no {name}, which model.policy.call has. Leave it out."
            if name in OTHER_OPTIONS:
                advice = OTHER_OPTIONS[name] or "Leave it out"
                return f"has model.policy.call.{name}={self.call[name]!r}, which the policy sets itself. {advice}."
        if (self.num_frames is not None) != ("num_frames" in known):
            return (
                f"makes {'videos. Set' if 'num_frames' in known else 'no videos. Leave out'} model.policy.num_frames."
            )
        if self.edits and "image" not in known:
            return f"takes no image, but model.policy.references={self.references}. Leave it out."
        if self.path_kind == "vp":
            return vp_misfit(pipeline)
        return flow_scheduler_misfit(pipeline.scheduler, only_euler=False)

    def adopt(self, pipeline: Any, put_start: PutStart | None = None) -> Policy:
        self._learned.clear()
        self._schedules.clear()
        self._watcher = None
        if self.lora_rank is not None:
            self.lora_targets = self.targets_in(getattr(pipeline, self.network_name))
        super().adopt(pipeline, put_start)
        if self.gradient_checkpointing:
            network, inputs = self.watcher.networks[self.network_name], self.learned.example.inputs
            if omitted := ", ".join(omitted_by_checkpointing(network, inputs)):
                raise LoadError(
                    f"model.policy.gradient_checkpointing=true: {type(network).__name__} then computes without "
                    f"{omitted}. Set it to false, or use the policy class of its family, if there is one."
                )
        if self.learned.decoded_shape and not self._decoded_shape(self.learned, 2):  # as HunyuanVideo 1.5's
            self.decode_batch_size = 1
        return self

    def targets_in(self, network: nn.Module) -> list[str]:
        return self.lora_targets or attention_layers(network)

    def _decoded_shape(self, learned: Learned, images: int = 1) -> tuple[int, ...]:
        """Return the shape that the VAE decodes, tried on the meta device; empty if it cannot be tried."""
        vae = self.pipeline.vae
        with suppress(RuntimeError, ValueError, NotImplementedError), torch.device("meta"), torch.no_grad():
            twin = type(vae).from_config(vae.config)
            return tuple(twin.decode(torch.empty(images, *learned.vae_shape), **learned.vae_options)[0].shape)
        return ()

    def _refuse_other_size(self, shape: tuple[int, ...]) -> None:
        """Raise LoadError if the pipeline does not make images of the size that it is asked for."""
        made = {"height": shape[-2:-1], "width": shape[-1:], "num_frames": shape[2:-2]}
        for name, wanted in (("height", self.height), ("width", self.width), ("num_frames", self.num_frames)):
            if wanted is not None and made[name] and made[name] != (wanted,):
                where = "model.policy" if name == "num_frames" else self.size_in
                given = f"{where}.{name}={wanted} is a size at which {self.pipeline_class} makes {made[name][0]}."
                # Both sides, since some pipelines change one that is given alone.
                others = ("num_frames",) if name == "num_frames" else ("height", "width")
                raise LoadError(f"{given} Set {' and '.join(f'{one}={made[one][0]}' for one in others)}.")

    def unused_weights(self) -> tuple[str, ...]:
        learned = self.learned
        index = to_meta(learned.to_prediction)
        found = []
        for name in self.network_names:
            start = f"{name}." if len(self.network_names) > 1 else ""
            example = replace(learned.example, network=name)
            idle = self.watcher.idle_weights(example, lambda output: picked(output.flatten(1), index))
            found += [start + pattern for pattern in idle]
        return tuple(found)

    def description(self) -> list[str]:
        """Return what was learned, in five lines; after a check alone, by the pipeline without weights."""
        if not self.loaded:
            return self.draft.description() if isinstance(self.draft, AutoPolicy) else []
        learned, rule = self.learned, self.learned.guidance
        times = [
            f"{leaf.name} = {linear(leaf.factor, 't' if leaf.shift == 1 else 't before the shift', leaf.offset)}"
            for leaf in learned.of_kind("time")
        ]
        rows = [
            f"{leaf.name} {list(leaf.one.shape)}{' of any length' * leaf.changes_size}"
            for leaf in learned.of_kind("row")
        ]
        layout = f"{list(learned.latent_shape)}"
        if learned.state_shape != learned.latent_shape:
            layout += f", passed as {list(learned.of_kind('latents')[0].one.shape)}"
        scale = linear(rule.factor, "s", rule.offset)
        guidance = {"none": f"none: it {rule.reason}", "input": f"an input, by {rule.option}"}.get(
            rule.rule, f"u + g (c - u), g = {scale} of {rule.option}{'' if rule.rule == 'linear' else f', {rule.rule}'}"
        )
        beside = " next to a picture's values" if learned.has_beside else ""
        return [
            f"time: {', '.join(times)}",
            f"latents: {layout}{beside}",
            f"prediction: {learned.sign:+g} times the output{' of one image per pass' * learned.takes_one}",
            f"guidance: {guidance}",
            f"conditioning: {', '.join(rows)}",
        ]

    def build_path(self) -> ProbabilityPath:
        if self.path_kind == "flow":
            times = self.learned.of_kind("time")
            return RectifiedFlow(self.dtype, 1) if abs(times[0].factor) == 1 else RectifiedFlow()
        base = self.pipeline.scheduler
        return VariancePreserving(vp_scheduler("ddim", base).alphas_cumprod, PREDICTIONS[base.config.prediction_type])

    # --- watched calls ----------------------------------------------------------------------------------------------

    @property
    def watcher(self) -> Watcher:
        if self._watcher is None or self._watcher.placed_on != self.device:
            networks = {name: getattr(self.pipeline, name) for name in self.network_names}
            self._watcher = Watcher(self.pipeline, networks, self.device, self._new_scheduler)
        return self._watcher

    def _new_scheduler(self) -> Any:
        base = self.pipeline.scheduler
        return type(base).from_config(base.config) if self.path_kind == "flow" else vp_scheduler("ddim", base)

    @property
    def learner(self) -> Learner:
        learner = Learner(self.watcher, self._arguments(), self._times, self._blank)
        if self._size_key() in self._learned:
            learner.off = self._learned[self._size_key()].guidance.off
        return learner

    def _size_key(self) -> tuple[Any, ...]:
        return self.height, self.width, self.num_frames

    def _sides(self) -> tuple[int, int]:
        """Return height and width of pictures to edit while the images' are not known."""
        return self.height or 512, self.width or 512

    def _arguments(self) -> dict[str, Any]:
        given = {"height": self.height, "width": self.width, "num_frames": self.num_frames}
        fixed = dict(FIXED_SIZE)
        if self.height is not None and self.width is not None:
            fixed["max_area"] = self.height * self.width
        return {name: value for name, value in given.items() if value is not None} | fixed | self.call

    def _times(self, scheduler: Any) -> Tensor:
        steps, timesteps = scheduler.config.num_train_timesteps, scheduler.timesteps.double()
        if self.path_kind == "vp":
            return (timesteps + 1) / steps
        levels = scheduler.sigmas[: len(timesteps)].double()
        is_rounded = bool((levels - timesteps / steps).abs().max() <= 2 / steps)  # else the network gets other times
        return timesteps / steps if is_rounded else levels

    def _blank(self, prompts: int, grey: float = 0.0) -> dict[str, Any]:
        if not self.edits:
            return {}
        key = (prompts, grey, *self._size_key())
        if key not in self._pictures:  # the same objects, whose embeddings are then kept
            pictures = torch.full((prompts * self.references, 3, *self._sides()), grey)
            self._pictures[key] = self.pipeline_references(pictures)
        return self._pictures[key]

    @property
    def learned(self) -> Learned:
        """What was learned of the pipeline at the current size."""
        key = self._size_key()
        if key not in self._learned:
            try:
                self._learned[key] = learned = self.learner.learn()
                learned.decoded_shape = self._decoded_shape(learned)
                self._refuse_other_size(learned.decoded_shape)
                self._prove()
            except Exception as error:  # the pipeline's code may raise anything
                self._learned.pop(key, None)
                where, options = f"{KEY}={self.checkpoint}:", " and ".join(f"call.{name}" for name in self.call)
                without = f"Leave out model.policy.{options}" if options else ""
                if isinstance(error, NotLearned):
                    advice = f"{without + ', or write' if options else 'Write'} a policy class (docs/add_a_policy.md)."
                    raise LoadError(f"{where} {self.pipeline_class} {error}. {advice}") from error
                if isinstance(error, LoadError):
                    raise
                needs_part, parts = "NoneType" in str(error), self.pipeline.components.items()
                nulls = [name for name, part in parts if part is None]
                absent = [name for name in nulls if needs_part or name.startswith("text_encoder")]
                if self.device.type == "meta" and not (needs_part and absent):  # where values do not exist
                    advice = "Read peak_memory_bytes in the summary.json of: lightning run RECIPE trainer.max_epochs=1"
                    raise NotEstimated(f"{self.pipeline_class} reads values of its tensors. {advice}") from error
                reason = f"{type(error).__name__}: {one_line(error).rstrip('.')}."
                if absent:
                    reason += f" It has no {' and no '.join(absent)}. To take another checkpoint's, set {COMPONENTS}."
                if "image" in self.watcher.parameters and not self.edits:
                    reason += " If it edits pictures, set model.policy.references=1."
                sides = [name for name in ("height", "width") if getattr(self, name) and name in str(error)]
                if sides:
                    reason += f" Set another {self.size_in}.{' or '.join(sides)}."
                elif options:
                    reason += f" {without}, if that is the cause."
                raise LoadError(f"{where} a call of {self.pipeline_class} fails. {reason}") from error
        return self._learned[key]

    def _prove(self) -> None:
        """Compare with the pipeline what the policy would pass the network, the scheduler and the VAE in a guided call.

        Raises:
            NotLearned: Something differs by more than rounding.
        """
        learned, rule = self.learned, self.learned.guidance
        device, rounding = self.watcher.device, ROUNDING
        of_texts = ROUNDING if self.dtype == torch.float32 else ROUNDING_16
        is_guided = rule.rule in ("linear", "norm", "clamped_norm")
        more = self._guided_arguments(PROOF_SCALE) if rule.rule != "none" else {}
        sides = [side * self.pixels_per_latent for side in learned.latent_shape[-2:]]
        shape = (1, 3, *learned.vae_shape[1:-2], *sides)
        fake = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        learner = self.learner
        seen = learner.call(PROOF, PROOF_STEPS, learner.guided_output, decode=lambda latents: fake, keeps=False, **more)
        encoded = self.encode_prompts([PROOF])
        if self.edits:
            encoded = self.encode_edits([PROOF], torch.zeros(1, self.references, 3, *self._sides()))
        conds = [Conditioning(encoded)]
        if is_guided:
            negative = self.negative_of(conds[0]) if self.edits else Conditioning(self.encode_negative())
            conds.insert(rule.negative_row, negative)
        times, per_step = self._times(seen.scheduler).float(), len(conds)
        solver = self.scheduler(self.solvers[0], PROOF_STEPS)
        refuse_difference("the times of its scheduler", self.scheduler_times(solver), times, rounding)
        outputs = [output for now in seen.passes for output in now.outputs]
        if len(outputs) != PROOF_STEPS * per_step:
            raise NotLearned(f"has {len(outputs)} rows in {PROOF_STEPS} steps, not {PROOF_STEPS * per_step}")
        for number, step in enumerate(seen.steps):
            z, t = self._latents_of(step["sample"]), times[number : number + 1].to(device)
            theirs = learned.rows([now for now in seen.passes if now.step == number])
            for (now, row), own in zip(theirs, conds, strict=True):
                refuse_difference("its network", self._network_at(times[number]), now.network, 0.0)
                tensors = {name: value.float() for name, value in own.tensors.items()}
                tensors["guidance"] = torch.full((1,), PROOF_SCALE, device=device)
                ours = self._inputs(z.float(), t, tensors, learned.alike(tensors, 1)[0][0])
                pairs = zip(values_at(learned.tree, ours), values_at(learned.tree, now.inputs, row), strict=True)
                for (leaf, mine), (_, value) in pairs:
                    if leaf.kind in ("time", "guidance") and leaf.dim is None and leaf.where is None:  # one number
                        mine, value = as_tensor(number_of(mine)), as_tensor(number_of(value))
                    share = of_texts if leaf.kind == "row" else rounding
                    refuse_difference(f"what its network gets as {leaf.name}", mine, value, share, leaf.changes_size)
            place = number * per_step
            made = [self._prediction(output[None].float()) for output in outputs[place : place + per_step]]
            prediction = made[0]
            if is_guided:
                with_prompt, without = made[1 - rule.negative_row], made[rule.negative_row]
                prediction = self.guided(with_prompt, without, PROOF_SCALE)
            taken = self._still(self._latents_of(step["model_output"]), prediction)
            refuse_difference("what its scheduler gets", prediction, taken, rounding)
            after = solver.step(step["model_output"], solver.timesteps[number], step["sample"], return_dict=False)[0]
            refuse_difference("what its scheduler returns", after, seen.states[number], rounding)
            if number:
                refuse_difference("its latents after a step", seen.states[number - 1], step["sample"], rounding)
        if seen.decoded is None or seen.result is None:
            raise NotLearned("does not decode with its VAE")
        after = self.sampled(self._latents_of(seen.states[-1]).float(), conds[0])
        refuse_difference("what its VAE gets", self.vae_latents(after), seen.decoded[0], rounding)
        picture = self._as_images(fake) / 2 + 0.5
        shown = seen.result[0][0]
        if not isinstance(shown, Tensor):
            raise NotLearned("does not return its pictures as tensors")
        refuse_difference("its picture", picture[0].clamp(0, 1), shown[..., :3, :, :], rounding)

    def _network_at(self, t: Tensor) -> str:
        """Return the name of the network for a time."""
        if len(self.network_names) == 1:
            return self.network_name
        return self.network_names[int(t * self.pipeline.scheduler.config.num_train_timesteps < self.network.boundary)]

    def _latents_of(self, state: Tensor) -> Tensor:
        """Return the policy's latents of the scheduler's."""
        return self._picked(state.flatten(1), "to_latents").reshape(len(state), *self.learned.latent_shape)

    def _call(self, prompt: str, last: int, **more: Any) -> Call:
        return self.learner.call(prompt, 2, last=last, keeps=False, **more)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _rows(self, seen: Call, row: int) -> dict[str, Tensor]:
        """Return a row's values of a step, by name, one row each."""
        return self.learned.conditioning(*self.learned.rows(seen.passes)[row])

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        return self._rows(self._call(prompts[0], 1), 0)

    def encode_negative(self) -> dict[str, Tensor]:
        rule = self.learned.guidance
        if rule.rule in ("none", "input"):
            return self.encode_prompts([self.negative_prompt])
        seen = self._call(self.negative_prompt, rule.passes, **self._guided_arguments(3.0))
        return self._rows(seen, rule.negative_row)

    def _guided_arguments(self, scale: float) -> dict[str, Any]:
        rule = self.learned.guidance
        takes = "negative_prompt" in self.watcher.parameters and (self.negative_prompt or rule.needs_negative)
        return {**rule.arguments(scale), **({"negative_prompt": self.negative_prompt} if takes else {})}

    @property
    def embedding_key(self) -> str:
        return f"{self._size_key()} {[leaf.name for leaf in self.learned.of_kind('row')]}\n"

    def encode_edits(self, prompts: list[str], pictures: Tensor) -> dict[str, Tensor]:
        rule, given = self.learned.guidance, self.pipeline_references(pictures)
        if rule.rule in ("none", "input"):
            return self._rows(self._call(prompts[0], 1, **given), 0)
        seen = self._call(prompts[0], rule.passes, **given, **self._guided_arguments(3.0))
        negative = self._rows(seen, rule.negative_row)
        kept = {NEGATIVE + name: value for name, value in negative.items() if name != BESIDE}
        return {**self._rows(seen, 1 - rule.negative_row), **kept}

    def negative_of(self, cond: Conditioning) -> Conditioning:
        if not self.edits:
            return super().negative_of(cond)
        kept = {name.removeprefix(NEGATIVE): value for name, value in cond.tensors.items() if name.startswith(NEGATIVE)}
        beside = {BESIDE: cond.tensors[BESIDE]} if BESIDE in cond.tensors else {}
        return Conditioning({**kept, **beside})

    def pipeline_references(self, pictures: Tensor) -> dict[str, Any]:
        shown = torch.zeros(pictures.shape) if pictures.is_meta else pictures
        images = to_pil(shown.flatten(0, -4))
        return {"image": images[0] if len(images) == 1 else images}

    def prompt_limit(self) -> tuple[Any, int, str]:
        parts = self.pipeline.components
        names = [name for name in parts if name.startswith(("tokenizer", "processor")) and parts[name] is not None]
        tokenizer = getattr(parts[names[-1]], "tokenizer", parts[names[-1]])
        encoder = names[-1].replace("tokenizer", "text_encoder").replace("processor", "text_encoder")
        default = self.watcher.parameters.get("max_sequence_length")
        limit = self._arguments().get("max_sequence_length", getattr(default, "default", None))
        most = tokenizer.model_max_length
        return tokenizer, min(limit or most, most), type(parts.get(encoder)).__name__

    # --- predictions ------------------------------------------------------------------------------------------------

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        prediction = self._predict(z, t, cond)
        if self.learned.from_picture is None:
            return prediction
        sides = [1] * (z.ndim - 1)
        return self._still(prediction, (z - self.sampled(z, cond)) / t.clamp(min=1e-4).reshape(-1, *sides))

    def _still(self, latents: Tensor, others: Tensor) -> Tensor:
        """Return latents with other values where they are a picture's."""
        if self.learned.from_picture is None:
            return latents
        index = self._copy("from_picture", self.learned.from_picture, latents.device)
        return torch.where((index >= 0).reshape(self.learned.latent_shape), others, latents)

    def sampled(self, z: Tensor, cond: Conditioning) -> Tensor:
        if self.learned.from_picture is None:
            return z
        index = self._copy("from_picture", self.learned.from_picture, z.device).clamp(min=0)
        return self._still(z, picked(cond.tensors[BESIDE].flatten(1).to(z), index).reshape(z.shape))

    def _predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        """Return the network's predictions."""
        groups = self.learned.alike(cond.tensors, len(z))
        if len(groups) == 1:
            return self._pass(z, t, cond.tensors, groups[0][0])
        parts = []
        for sizes, rows in groups:
            chosen = torch.tensor(rows, device=z.device)
            parts.append(self._pass(z[chosen], t[chosen], cond.select(chosen).tensors, sizes))
        order = torch.tensor([row for _, rows in groups for row in rows], device=z.device).argsort()
        return torch.cat(parts)[order]

    def _pass(self, z: Tensor, t: Tensor, tensors: Mapping[str, Tensor], sizes: Mapping[str, Sequence[int]]) -> Tensor:
        """Return the predictions for rows whose conditioning has the same sizes."""
        if len(self.network_names) == 1:
            return self._prediction(stacked(prediction_of(self.network(**self._inputs(z, t, tensors, sizes)))))

        def inputs(rows: Any) -> dict[str, Any]:
            chosen = {name: value[rows] for name, value in tensors.items()}
            return self._inputs(z[rows], t[rows], chosen, sizes)

        return self._prediction(self.network(z, t * self.pipeline.scheduler.config.num_train_timesteps, inputs)[0])

    def _prediction(self, output: Tensor) -> Tensor:
        """Return the predictions in a network's output, in the layout of the latents."""
        flat = self._picked(output.flatten(1), "to_prediction")
        sign = self.learned.sign
        return (flat if sign == 1 else sign * flat).reshape(len(output), *self.learned.latent_shape)

    def _inputs(
        self, z: Tensor, t: Tensor, tensors: Mapping[str, Tensor], sizes: Mapping[str, Sequence[int]]
    ) -> dict[str, Any]:
        """Return the network's arguments."""
        learned, number = self.learned, len(z)

        @cache
        def unpadded(name: str) -> list[Tensor]:
            rows = tensors[name]
            if rows.is_meta:  # sizes have no values
                return list(rows)
            sides = tensors[SIZE_OF + name].int().tolist()
            return [row[tuple(map(slice, size))] for row, size in zip(rows, sides, strict=True)]

        def narrowed(value: Tensor) -> Tensor:
            # On a CPU, a norm in 16 bits takes no float32 under autocast. Embeddings of 16 bits lose nothing.
            if z.device.type != "cpu" or not value.is_floating_point():
                return value
            narrow = value.to(self.dtype)
            return narrow if torch.equal(narrow.to(value), value) else value

        def value_of(leaf: Leaf) -> Any:
            if leaf.kind == "fixed" and not isinstance(leaf.value, Tensor):
                return leaf.value
            if leaf.kind == "latents":
                return self._network_latents(leaf, z, tensors)
            if leaf.kind == "row":
                value = tensors[leaf.name]
                if leaf.is_padded:
                    return unpadded(leaf.name)
                if leaf.name in sizes and not any(sizes[leaf.name]):
                    return None
                if leaf.name in sizes:
                    value = value[(slice(None), *(slice(side) for side in sizes[leaf.name]))]
                if not isinstance(leaf.value, Tensor):
                    return value
                if value.is_meta and not leaf.value.is_floating_point():
                    return torch.ones(value.shape, dtype=leaf.value.dtype)  # all of a mask
                return narrowed(as_type(value, leaf.value.dtype))
            one = self._on_device(leaf, z.device)
            if leaf.kind == "fixed":
                return narrowed(one).expand(number, *one.shape[1:])
            given = before_shift(t, leaf.shift) if leaf.kind == "time" else tensors["guidance"]
            values = given if (leaf.factor, leaf.offset) == (1, 0) else leaf.offset + leaf.factor * given
            values = as_type(values, one.dtype) if self.path_kind == "vp" else values  # a flow's may be rounded
            values = values.reshape(number, *[1] * (one.ndim - 1)).expand(number, *one.shape[1:])
            if leaf.where is None:
                return values
            return torch.where(self._copy(f"{leaf.name} where", leaf.where, z.device), values, one)

        inputs: dict[str, Any] = built(learned.tree, number, value_of)
        return inputs

    def _network_latents(self, leaf: Leaf, z: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        flat = z.flatten(1)
        if self.learned.has_beside:
            beside = tensors[BESIDE].flatten(1) if BESIDE in tensors else self._on_device(leaf, z.device).flatten(1)
            flat = torch.cat([flat, beside.expand(len(z), -1).to(flat)], dim=1)
        return self._picked(flat, "to_network").reshape(len(z), *leaf.one.shape)

    def _on_device(self, leaf: Leaf, device: torch.device) -> Tensor:
        """Return a leaf's value for one image, with a first dimension of 1."""
        return self._copy(leaf.name, leaf.one.unsqueeze(0), device)

    def _picked(self, values: Tensor, name: str) -> Tensor:
        """Return values ``(B, n)`` in the order of one of the learned maps."""
        index: Tensor | None = getattr(self.learned, name)
        return picked(values, None if index is None else self._copy(name, index, values.device))

    def _copy(self, name: str, value: Tensor, device: torch.device) -> Tensor:
        """Return a copy of what was learned on a device, made once."""
        copies = self.learned.copies
        if (name, device) not in copies:
            with torch.inference_mode(False):
                copies[name, device] = value.to(device)
        return copies[name, device]

    def guided(self, with_prompt: Tensor, without: Tensor, guidance: Any) -> Tensor:
        learned = self.learned
        if learned.guidance.rule == "linear":
            return super().guided(with_prompt, without, guidance)
        c, u = (
            self._picked(values.flatten(1), "from_prediction").reshape(len(values), *learned.kept_shape)
            for values in (with_prompt, without)
        )
        combined = guided(learned.guidance.rule, learned.guidance.dims, c, u, guidance).flatten(1)
        return self._picked(combined, "to_kept").reshape(with_prompt.shape)

    @property
    def embeds_guidance(self) -> bool:
        return self.loaded and self.learned.guidance.rule == "input"

    def guidance_error(self) -> str | None:
        rule = self.learned.guidance if self.loaded else None
        if rule is None or rule.rule != "none":
            return None
        return f"{self.checkpoint} cannot be guided: {self.pipeline_class} {rule.reason}. Use a scale of 1."

    def pipeline_guidance(self, guidance: float, prompts: int) -> dict[str, Any]:
        rule = self.learned.guidance
        if rule.rule == "none" or (guidance == 1.0 and rule.rule != "input"):
            given = rule.off
        else:
            given = self._guided_arguments(guidance)
        return {name: value for name, value in given.items() if name != GUIDER}

    def pipeline_parts(self, guidance: float) -> dict[str, Any]:
        return guiders_at(self.pipeline, self._guider(guidance))

    def _guider(self, guidance: float) -> Any:
        """Return the scale, or the options, of the pipeline's guiders at a guidance scale of the policy."""
        rule = self.learned.guidance
        return (rule.off if guidance == 1.0 or rule.rule == "none" else rule.arguments(guidance)).get(GUIDER, {})

    # --- times and latents ------------------------------------------------------------------------------------------

    def scheduler(self, solver: str, steps: int) -> Any:
        base = self.pipeline.scheduler
        if self.path_kind == "vp":
            return vp_scheduler(solver, base, steps)
        if solver == self.solvers[0]:
            return self._flow_scheduler(solver, steps)
        middles = [self._times(self._flow_scheduler(name, LONG)).median() for name in (self.solvers[0], solver)]
        is_apart = any(leaf.shift != 1 for leaf in self.learned.of_kind("time"))  # from the noise levels
        if is_apart or abs(middles[0] - middles[1]) > SAME_MIDDLE:
            own = f"{type(base).__name__} of {self.pipeline_class}"
            raise ValueError(f"solver={solver!r} cannot follow the times of the {own}. Use {self.solvers[0]}.")
        return self._flow_scheduler(solver, steps)

    def _flow_scheduler(self, solver: str, steps: int) -> Any:
        base, given = self.pipeline.scheduler, self._schedule(steps)
        if solver == self.solvers[0]:
            scheduler = like(base, steps)
            scheduler.set_timesteps(**given)
            return scheduler
        if self.solvers[0] != FLOW_SOLVERS[0]:
            base, given = euler_like(base), {}
        return flow_scheduler(solver, base, steps, 0, given.get("sigmas"), given.get("mu"))

    def _schedule(self, steps: int) -> dict[str, Any]:
        """Return the arguments with which the pipeline sets its scheduler's times."""
        key = (*self._size_key(), steps)
        if key not in self._schedules:
            with waiting(self.network) if self.offload_network else nullcontext():  # the call needs the encoders
                self._schedules[key] = self.learner.call(WORDS[0], steps, last=1).schedule
        return self._schedules[key]

    def scheduler_times(self, scheduler: Any) -> Tensor:
        return self._times(scheduler).float()

    def scheduler_lines(self, spec: RolloutSpec) -> list[str]:
        lines, guiders = super().scheduler_lines(spec), list[str]()
        for name, guider in self.pipeline_parts(spec.guidance).items():
            options = guider_options(guider, self._guider(spec.guidance)).items()
            guiders.append(f"pipe.{name} = pipe.{name}.new({', '.join(f'{key}={value!r}' for key, value in options)})")
        passes_times = self.path_kind == "flow" and self._schedule(spec.steps).keys() & {"sigmas", "timesteps", "mu"}
        return [*lines, *(OWN_TIMESTEPS if lines and passes_times else ()), *guiders]

    def find_latent_shape(self) -> tuple[int, ...]:
        return self.learned.latent_shape

    @property
    def pixels_per_latent(self) -> int:
        height = (*self.learned.decoded_shape[-2:-1], self.height)[0]
        if height is None:
            raise LoadError(f"{self.checkpoint} does not show its images' size. Set model.policy.height and width.")
        return height // self.learned.latent_shape[-2]

    def prior(self, generators: Sequence[torch.Generator]) -> Tensor:
        if not self.learned.draws_state:
            return super().prior(generators)
        return self._latents_of(unit_noise(generators, self.learned.state_shape).to(self.device))

    def pipeline_latents(self, noise: Tensor) -> Tensor:
        learned = self.learned
        if learned.packs is None:
            learned.packs = self.learner.packs(learned)
        return noise if learned.packs else self._state_of(noise)

    def _state_of(self, latents: Tensor) -> Tensor:
        """Return the scheduler's latents of the policy's."""
        return self._picked(latents.flatten(1), "from_latents").reshape(len(latents), *self.learned.state_shape)

    def vae_latents(self, latents: Tensor) -> Tensor:
        learned = self.learned
        scale, shift = self._affine(latents.device)
        latents = latents * scale + shift
        if learned.block > 1:
            latents = F.pixel_shuffle(latents, learned.block)
        return latents.unsqueeze(2) if learned.is_one_frame else latents

    def _affine(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return scale and shift from the latents to the VAE's."""
        learned = self.learned
        return learned.vae_scale.to(device), learned.vae_shift.to(device)

    def vae_decode(self, latents: Tensor) -> Tensor:
        return self._as_images(self.pipeline.vae.decode(latents, return_dict=False, **self.learned.vae_options)[0])

    def _as_images(self, images: Tensor) -> Tensor:
        """Return images or videos from what the VAE decodes."""
        if images.ndim == 5:
            return images[:, :, 0] if self.learned.is_one_frame else images.transpose(1, 2)[:, :, :3]
        return images[:, :3]

    def vae_encode(self, images: Tensor) -> Tensor:
        learned = self.learned
        scale, shift = self._affine(images.device)
        images = images.unsqueeze(2) if learned.is_one_frame else images.transpose(1, 2) if images.ndim == 5 else images
        encoded = self.pipeline.vae.encode(images)
        latents = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
        if learned.block > 1:
            latents = F.pixel_unshuffle(latents, learned.block)
        return (latents.reshape(len(latents), *learned.latent_shape) - shift) / scale


def is_flow(config: Mapping[str, Any]) -> bool:
    """Return whether a scheduler's configuration is that of a rectified flow."""
    named = str(config.get("_class_name", "")).startswith("FlowMatch")
    return named or bool(config.get("use_flow_sigmas")) or config.get("prediction_type") == "flow_prediction"


def as_type(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in an integer type, rounded, or as they are in a floating-point one."""
    if dtype.is_floating_point:
        return value
    return value.bool() if dtype == torch.bool else value.round().to(dtype)


def refuse_difference(what: str, ours: Any, theirs: Any, rounding: float, is_padded: bool = False) -> None:
    """Raise NotLearned if two values differ by more than a share of the largest.

    Args:
        rounding: The share.
        is_padded: A longer value ends in padding.
    """
    if not isinstance(theirs, Tensor):
        if ours != theirs:
            raise NotLearned(f"does not follow what was learned: {what} is {theirs}, and would be {ours}")
        return
    if ours.numel() == theirs.numel() == 1:
        ours = ours.reshape(theirs.shape)
    if ours.ndim != theirs.ndim or not (is_padded or ours.shape == theirs.shape):
        raise NotLearned(f"does not follow what was learned: {what} has another shape")
    window = tuple(slice(0, min(a, b)) for a, b in zip(ours.shape, theirs.shape, strict=True))
    mine, value = ours[window].double().cpu(), theirs[window].double().cpu()
    difference = ((mine - value).abs().max() / value.abs().max().clamp(min=1e-3)).item() if value.numel() else 0.0
    if not difference <= rounding:
        raise NotLearned(f"does not follow what was learned: {what} differs by {difference:.1e} of its largest value")


def linear(factor: float, name: str, offset: float) -> str:
    """Return ``offset + factor name`` as a text."""
    return (f"{factor:g} " if factor != 1 else "") + name + (f" {offset:+g}" if offset else "")


def picked(values: Tensor, index: Tensor | None) -> Tensor:
    """Return ``values[:, index]``."""
    return values if index is None else values.index_select(1, index)


def attention_layers(network: nn.Module) -> list[str]:
    """Return the names of the linear layers in a network's attention modules, for an adapter."""
    modules, found = dict(network.named_modules()), set[str]()
    for name, module in modules.items():
        kind = type(module).__name__
        if ("Attention" in kind or "Attn" in kind) and "Block" not in kind and "Norm" not in kind:
            inner = [part for part, layer in module.named_modules() if isinstance(layer, nn.Linear)]
            found |= {f"{name}.{part}" for part in inner if "norm" not in part}
    shared = {name_in_block(name) for name in found}
    others = [name for name, module in modules.items() if not isinstance(module, nn.Linear)]
    unclear = {short for short in shared if any(is_target(name, short) for name in others)}  # of a list elsewhere
    return sorted(shared - unclear) + sorted(name for name in found if name_in_block(name) in unclear)
