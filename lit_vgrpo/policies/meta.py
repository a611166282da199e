"""A policy built from a pipeline's configuration files on torch's meta device: shapes and dtypes, no weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lit_vgrpo.core.sampling import schedule_of
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.errors import error_in_user_code, is_deliberate, one_line
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.loading import KEY, config_folder, pipeline_on_meta
from lit_vgrpo.policies.published import published_pipeline
from lit_vgrpo.system.hub import SMALL_FILES, LoadError, quiet_libraries

LOWERED = frozenset({"linear", "conv1d", "conv2d", "conv3d", "matmul", "__matmul__", "bmm", "baddbmm", "addmm"})
RAISED = frozenset({"layer_norm", "group_norm", "softmax", "pow", "__pow__", "exp", "norm"})
"""Names of torch functions that autocast computes in the lower dtype, and in float32 on a GPU."""
INDEXED = ("__getitem__", "__setitem__", "repeat_interleave")
"""Names of torch functions that read the values of integers, and take those of the CPU for meta tensors."""


class NotEstimated(Exception):
    """The memory of a recipe cannot be estimated; the message is the reason."""


class AutocastOnMeta(TorchFunctionMode):
    """Replacement of ``torch.autocast`` for meta tensors, which it does not support; attention is always fused.

    With float32 nothing is cast. Norms are computed in float32 on a GPU, but not on a CPU.

    Args:
        masks_are_full: Take a condition on a tensor without values for true, as where a text encoder looks for padding.
    """

    def __init__(
        self, dtype: torch.dtype = torch.float32, device_type: str = "cuda", masks_are_full: bool = False
    ) -> None:
        super().__init__()
        self.dtype, self.masks_are_full = dtype, masks_are_full
        self.raised = RAISED if device_type == "cuda" else frozenset()
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self.masks_are_full and name == "__bool__" and args[0].is_meta:
            return True
        if name not in INDEXED and len({leaf.is_meta for leaf in tree_leaves((args, kwargs)) if _has_values(leaf)}) > 1:
            # integers stay on the CPU, where networks read masks and sizes, until they meet others
            args, kwargs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        if name == "scaled_dot_product_attention":
            args, kwargs = self._cast((args, kwargs), self.dtype)
            return _attention(*args, **kwargs)
        if self.dtype != torch.float32 and name in LOWERED:
            args, kwargs = self._cast((args, kwargs), self.dtype)
        elif self.dtype != torch.float32 and name in self.raised:
            args, kwargs = self._cast((args, kwargs), torch.float32)
        return func(*args, **kwargs)

    def _cast(self, values: Any, dtype: torch.dtype) -> Any:
        def cast(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
                return value
            if not (value.is_leaf and value.requires_grad):
                return value.to(dtype)
            # Autocast keeps the weights that it has cast until the forward pass ends. The weight itself keeps its id.
            return self._weights.setdefault(id(value), (value, value.to(dtype)))[1]

        return tree_map(cast, values)

    def __enter__(self) -> Any:
        self._outer = torch.autocast  # fails for the device of a tensor that a network asks
        setattr(torch, "autocast", _autocast)  # noqa: B010  # the type is not assigned to
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        setattr(torch, "autocast", self._outer)  # noqa: B010
        self._weights.clear()
        super().__exit__(*error)


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
    return nullcontext() if device_type == "meta" else torch.amp.autocast(device_type, *args, **kwargs)


def _has_values(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """Attention without the matrix of all token pairs, which torch would allocate on the meta device."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    causal, scale = options.get("is_causal", False), options.get("scale")
    return fused(query, key, value, dropout_p, causal, attn_mask=attn_mask, scale=scale)[0]


def policy_on_meta(policy: Policy, device_type: str = "cuda") -> Policy:
    """Return a loaded copy of a policy with all weights on the meta device, with the autocast of a type of device.

    Raises:
        NotEstimated: The pipeline's configuration files are not on this machine, or its check finds an error in them.
        LoadError: An option of the policy does not fit them.
    """
    draft = policy.draft
    policy.draft = None  # its user changes it
    twin = draft if isinstance(draft, Policy) else _copy_on_meta(policy, draft)
    twin.autocast = lambda dtype=None: AutocastOnMeta(dtype or twin.dtype, device_type)  # type: ignore[method-assign]
    # Recomputation in the backward pass must use the same dtypes.
    networks = [(network, None) for network in twin.networks().values()] if twin.gradient_checkpointing else []
    for network, dtype in (*networks, (twin.pipeline.vae, twin.decode_dtype)):
        with suppress(ValueError):  # this VAE does not support it
            contexts = partial(_contexts, twin, dtype)
            network.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False, context_fn=contexts))
    return twin


def _copy_on_meta(policy: Policy, draft: Any) -> Policy:
    """Return a loaded copy of a policy, with the pipeline that its check built, or another one."""
    name, folder = policy.checkpoint, config_folder(policy.checkpoint, policy.revision)
    which = f" --revision {policy.revision}" if policy.revision else ""
    small = " ".join(f'--include "{pattern}"' for pattern in SMALL_FILES)
    missing = NotEstimated(f"small files of {name} are not on this machine. Run: hf download {name}{which} {small}")
    try:
        pipeline = draft or (published_pipeline(policy) if folder is None else pipeline_on_meta(policy, folder))
    except LoadError as error:  # which the policy's check reports
        raise missing from error
    if pipeline is None:
        raise missing
    twin = copy.deepcopy(policy, {id(policy.given): None})
    twin.draft = pipeline
    for name in [name for name in vars(twin) if callable(getattr(type(twin), name, None))]:
        vars(twin).pop(name)  # a method replaced in the policy would act on the policy
    # These affect no size, or need weights.
    twin.embedding_cache, twin.start_from, twin.attention_backend = None, None, None
    twin.compile_network = twin.offload_encoders = False
    with quiet_libraries():
        for network in twin.network_names:
            getattr(pipeline, network).to(twin.dtype if twin.lora_rank or twin.train_only else torch.float32)
        twin.adopt(pipeline)
    return twin


def flops_per_image(policy: Policy) -> tuple[int, int]:
    """Return the floating-point operations of a network pass on one image, without and with its backward pass.

    Recomputation by gradient checkpointing is not counted. Raises as in :func:`policy_on_meta`.
    """
    twin = policy_on_meta(policy)
    for network in twin.networks().values() if twin.gradient_checkpointing else ():
        network.disable_gradient_checkpointing()
    cond = twin.encode(["a"], twin.blank_references(1))
    z, t = torch.empty(1, *twin.latent_shape, device="meta"), torch.empty(1, device="meta")
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        twin(z, t, cond)
    with FlopCounterMode(display=False) as both:
        twin(z, t, cond).sum().backward()
    return forward.get_total_flops(), both.get_total_flops()


def _contexts(policy: Policy, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Return the contexts of a forward pass and of its recomputation."""
    return nullcontext(), policy.autocast(dtype)


def drawing_errors(policy: Policy, specs: Sequence[RolloutSpec] = ()) -> list[str]:
    """Return why a policy cannot sample an image, tried without weights right after its check; at most one line."""
    if policy.draft is None or isinstance(policy.draft, Policy):
        return []
    stage = "its loading"
    try:
        twin = policy_on_meta(policy)
        with torch.no_grad():
            stage = "its text encoders"
            cond = twin.encode(["a"], twin.blank_references(1))
            stage = f"its {' and '.join(twin.network_names)}"
            z, t = torch.empty(1, *twin.latent_shape, device="meta"), torch.empty(1, device="meta")
            if (shape := twin(z, t, cond).shape) != z.shape:
                raise RuntimeError(f"it returns {list(shape[1:])} for latents {list(z.shape[1:])}")
            stage = "its VAE"
            twin.decode(z)
            for spec in specs:
                if spec.ode_solver(twin.solvers) in twin.solvers:
                    schedule_of(twin, spec)
        vars(policy)["draft"] = twin  # not a submodule
    except LoadError as error:
        return [str(error)]
    except Exception as error:
        # Values do not exist on the meta device. Anything else would also happen with weights.
        if isinstance(error, NotEstimated | NotImplementedError) or "meta" in str(error):
            return []
        if is_deliberate(error):
            return [str(error)]
        reason = error_in_user_code(error) or f"{one_line(error).rstrip('.')}."
        return [f"{KEY}={policy.checkpoint}: {stage} would fail: {reason} Do all parts belong to one model?"]
    return []
