"""DeepSpeed ZeRO and torch's FSDP2 as Lightning strategies.

Private names are those of lightning 2.6.6 and deepspeed 0.19.8.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lit_vgrpo.core.ranges import PositiveInt, checked
from lit_vgrpo.core.sharding import cut, full, is_sharded, laid_out_as, local
from lit_vgrpo.training.checkpoint_file import PortableCheckpoints
from lit_vgrpo.training.context_parallel import context_errors, share_tokens
from lit_vgrpo.training.evaluation import TrainingModule
from lit_vgrpo.training.optimizer import resumed_group


class StoredPrecision(DeepSpeedPrecision):
    """Keeps the policy's storage dtypes; Lightning's plugin casts a frozen bfloat16 base to float32."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module


@checked
class ZeRO(PortableCheckpoints, DeepSpeedStrategy):
    """DeepSpeed ZeRO over the policy's network, with torch's AdamW; also on CPUs over gloo, for tests.

    Args:
        stage: 1 shards the optimizer state, 2 also gradients, 3 also the weights, frozen ones included.
        offload: Keep the optimizer state, and in stage 3 the weights, in CPU memory.
        bucket_size: Elements per reduction or gathering.
        zero_options: Further entries of DeepSpeed's ``zero_optimization``.
    """

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload: bool = False,
        bucket_size: PositiveInt = 50_000_000,
        zero_options: dict[str, Any] | None = None,
    ) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
        buckets = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
        zero: dict[str, Any] = {"stage": stage, **dict.fromkeys(buckets, bucket_size)}
        if offload:
            on_cpu = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
            zero["offload_optimizer"] = on_cpu
            if stage == 3:
                zero["offload_param"] = on_cpu
        config = {
            "zero_optimization": {**zero, **(zero_options or {})},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's needs compiling and computes a different AdamW
            "train_micro_batch_size_per_gpu": 1,  # only for its log
        }
        super().__init__(config=config)
        self.stage = stage
        self.offload = offload

    # --- set-up ----------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        # Lightning's method refuses everything but GPUs.
        DDPStrategy.setup_environment(self)

    @override
    def setup_distributed(self) -> None:
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_distributed()
            return
        import deepspeed

        # On CPUs DeepSpeed would compile its shared-memory collectives for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    @override
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device  # DeepSpeed needs an index

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        # The pipeline loads whole, with text encoders and VAE; deepspeed.initialize then shards the network.
        yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self.precision_plugin = StoredPrecision("32-true")
        assert self.config is not None
        clip = getattr(self.lightning_module, "gradient_clip_val", None)  # an evaluation's module has none
        self.config["gradient_clipping"] = clip or 0.0
        super().setup(trainer)
        if self.stage == 3:
            # core/sharding.py calls it after it has written to the weights.
            for parameter in self.deepspeed_engine.module.parameters():
                parameter.forget_gathered = self.deepspeed_engine.optimizer.empty_partition_cache

    # --- steps -----------------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        self.deepspeed_engine.set_gradient_accumulation_boundary(False)
        yield
        self.deepspeed_engine.set_gradient_accumulation_boundary(True)
        self._end_micro_batch()

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self._end_micro_batch()
        return output

    def _end_micro_batch(self) -> None:
        # The engine does it where its forward pass begins, which is that of a whole training step.
        zero: Any = self.deepspeed_engine.optimizer
        zero.clear_backward_seen_flag()
        if self.stage == 3:
            zero.empty_partition_cache()  # else the weights stay gathered until the next pass

    def last_gradient_norm(self) -> Tensor | None:
        """Return the gradient norm of the last update before clipping; ``None`` before the first."""
        norm = self.deepspeed_engine.get_global_grad_norm()
        return None if norm is None else torch.tensor(float(norm))

    # --- the optimizer's state -------------------------------------------------------------------------------------

    @property
    def _partitions(self) -> list[Tensor]:
        """Flat float32 weights that AdamW steps."""
        zero: Any = self.deepspeed_engine.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return AdamW's ``state_dict``, whole on rank 0; all ranks must call it."""
        from deepspeed.utils import safe_get_full_optimizer_state

        adam = self.deepspeed_engine.optimizer.optimizer
        trained = list(self._trained.values())
        group = {k: v for k, v in adam.param_groups[0].items() if k != "params" and not k.startswith("_")}
        group["params"] = list(range(len(trained)))
        state: dict[int, dict[str, Tensor]] = {}
        if adam.state:
            first = adam.state[self._partitions[0]]
            place = "cpu" if self.is_global_zero else "meta"
            for index, parameter in enumerate(trained):
                state[index] = {"step": first["step"].detach().cpu().clone()}
                for key in ("exp_avg", "exp_avg_sq"):
                    state[index][key] = safe_get_full_optimizer_state(parameter, key).to(place)
        return {"state": state, "param_groups": [group]}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        saved = checkpoint["optimizer_states"][0]
        zero: Any = self.deepspeed_engine.optimizer
        adam = zero.optimizer
        group = resumed_group(adam.param_groups[0], saved["param_groups"][0])
        adam.param_groups[0].update({k: v for k, v in group.items() if k != "params"})
        step = common_step(saved["state"], len(self._trained))
        if step is None:
            return
        # AdamW creates its state in its first step.
        for partition in self._partitions:
            adam.state[partition] = {
                "step": step.clone(),
                "exp_avg": torch.zeros_like(partition),
                "exp_avg_sq": torch.zeros_like(partition),
            }
        if self.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()
        for index, parameter in enumerate(self._trained.values()):
            for key in ("exp_avg", "exp_avg_sq"):
                value = saved["state"][index][key]
                if self.stage == 3:
                    safe_set_local_optimizer_state(parameter, cut(parameter, value), key)
                else:
                    safe_set_full_optimizer_state(parameter, value, key)


def common_step(state: Mapping[int, Mapping[str, Tensor]], weights: int) -> Tensor | None:
    """Return the number of AdamW's steps, equal for all weights; ``None`` if it has not taken one.

    Raises:
        RuntimeError: The weights took different numbers of steps, but ZeRO corrects the bias of all by one number.
    """
    if not state:
        return None
    taken = {int(state[index]["step"]) if index in state else 0 for index in range(weights)}
    if len(taken) > 1:
        raise RuntimeError(
            f"AdamW took from {min(taken)} to {max(taken)} steps on the checkpoint's weights, and ZeRO needs the same "
            "number for all. Resume with trainer.strategy=ddp or fsdp2."
        )
    return state[0]["step"]


@torch.no_grad()
def local_gradients(parameters: Iterable[Any]) -> Iterator[Tensor]:
    """Yield this rank's gradients, or its shards of them, as they are when an optimizer step is due.

    ZeRO has reduced them by then and keeps them outside ``.grad``; other strategies' are taken from there.
    """
    for parameter in parameters:
        gradient: Tensor | None = None
        if hasattr(parameter, "ds_tensor"):  # ZeRO-3
            from deepspeed.utils import safe_get_local_grad

            gradient = safe_get_local_grad(parameter)
        elif hasattr(parameter, "_hp_mapping"):  # ZeRO-1 and 2, which have public access only to whole gradients
            part = parameter._hp_mapping  # None if all of it belongs to other ranks
            gradient = part and part.get_lp_grad_fragment(parameter._index_in_param_group)
        elif parameter.grad is not None:
            gradient = local(parameter.grad)
        if gradient is not None:
            yield gradient


@checked
class FSDP2(PortableCheckpoints, ModelParallelStrategy):
    """Fully sharded data parallelism; see :func:`shard`.

    Args:
        shard_size: Number of consecutive processes, such as those of one machine, that shard the weights; the other
            processes hold replicas (HSDP). ``None`` uses all processes.
        context_parallel: Number of consecutive processes that share the tokens of their images, for long sequences.
    """

    def __init__(self, shard_size: PositiveInt | None = None, context_parallel: PositiveInt = 1) -> None:
        super().__init__(tensor_parallel_size=context_parallel, save_distributed_checkpoint=False)
        self.shard_size, self.context_parallel = shard_size, context_parallel

    def mesh_errors(self) -> list[str]:
        """Return one line for each option that does not divide the number of processes."""
        options, processes = ("shard_size", "context_parallel"), self.num_nodes * self.num_processes
        return [
            f"trainer.strategy.{name}={size} does not divide {processes} processes. "
            f"Set trainer.devices to a multiple of {size}."
            for name, size in ((name, getattr(self, name)) for name in options)
            if size is not None and processes % size
        ]

    @override
    def setup_environment(self) -> None:
        for error in self.mesh_errors():
            raise ValueError(error)
        self._data_parallel_size = self.num_nodes * self.num_processes // self.context_parallel
        super().setup_environment()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        # Not in configure_model: whole checkpoint weights are loaded between the two.
        module = cast(TrainingModule, self.lightning_module)
        network, device, degree = module.policy.network, self.root_device.type, self.context_parallel
        if not any(is_sharded(p) for p in network.parameters()):
            for error in context_errors(module.policy, degree, module.evaluator.sides):
                raise ValueError(error)
            for part in module.policy.networks().values() if degree > 1 else ():
                share_tokens(part, degree, self.world_size, device)
            size = self.shard_size or self.world_size
            shape, names = (self.world_size // size, size), ("replicate", "shard")
            mesh = init_device_mesh(device, shape, mesh_dim_names=names)
            shard(network, mesh["shard"] if size == self.world_size else mesh)
        super().setup(trainer)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # FSDP2 averages over all processes, but each process that shares tokens has only a part of the gradient.
        return super().backward(closure_loss * self.context_parallel, *args, **kwargs)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's ``state_dict``, whole on rank 0; all ranks must call it."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        saved = optimizer.state_dict()
        state = {
            index: {key: full(v, v.to_local()) if isinstance(v, DTensor) else v for key, v in values.items()}
            for index, values in saved["state"].items()
        }
        return {**saved, "state": state}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        saved = checkpoint["optimizer_states"][0]
        state = {}
        for index, parameter in enumerate(self._trained.values()):
            if index in saved["state"]:
                values = saved["state"][index]
                assert isinstance(parameter, DTensor)
                state[index] = {k: laid_out_as(parameter, v) if v.ndim else v for k, v in values.items()}
        self.optimizers[0].load_state_dict({**saved, "state": state})


def shard(network: nn.Module, mesh: Any) -> None:
    """Shard a diffusers network over a mesh, block by block, with ``fully_shard``.

    Every module, the root included, reshards after each forward pass: a rollout runs many forward passes without a
    backward pass, and copies of the weights may be swapped in between.
    """
    from torch.distributed.fsdp import fully_shard

    for module in [*blocks_of(network), network]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """Return the innermost modules of the classes that diffusers does not split over devices.

    In a UNet such classes are nested: a single up block has nearly half of SDXL's weights, which would all be gathered
    at once.
    """
    names = frozenset(getattr(network, "_no_split_modules", None) or ())

    def innermost(module: nn.Module) -> list[nn.Module]:
        blocks = []
        for child in module.children():
            blocks += innermost(child) or ([child] if type(child).__name__ in names else [])
        return blocks

    return innermost(network)
