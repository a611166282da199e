"""Training of a built recipe, up to its exit status and last lines."""

from __future__ import annotations

import math
import signal
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_vgrpo.data import PromptError
from lit_vgrpo.errors import UserError, error_in_user_code, is_deliberate, one_line, report, say, shell_line
from lit_vgrpo.rewards.base import RewardError
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.process import is_first_process, requeue_job
from lit_vgrpo.training.folder import EXPORT, REPORT_NAME, WRITTEN
from lit_vgrpo.training.resume import how_to_resume, last_words, newest_checkpoint, next_commands
from lit_vgrpo.training.trainer_internals import call_train_hooks_at_end, declared, rehearse_setup
from lit_vgrpo.training.watchdog import GRACE_S, Watch, watched

if TYPE_CHECKING:
    from lit_vgrpo.launch.recipe_cli import RecipeCLI

FINISHED, FAILED, MISTAKE = 0, 1, 2


def train(cli: RecipeCLI) -> int:
    """Fit, report how training ended, and return the exit status.

    It is 0, 1 if training failed or its end could not be saved, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
    Raises UserError if Lightning refused the checkpoint or the recipe before training began.
    """
    checkpoints, listens = cli.checkpoints, False
    with watched(cli.trainer) as watch:
        try:
            with checkpoints.listening(watch):
                listens = True
                if cli.resumption is not None and cli.resumption.is_at_end(cli.trainer):
                    call_train_hooks_at_end(cli.trainer)  # the final evaluation, export and summary
                start = None if cli.ckpt_path is None else str(cli.ckpt_path)
                cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=start)
        except (SystemExit, KeyboardInterrupt) as error:
            if not listens:  # Ctrl-C, just before
                raise
            if not checkpoints.interrupted and not checkpoints.terminated:
                return _fail(cli, watch, error)
        except (RewardError, PromptError, FloatingPointError) as error:
            report([str(error)])
            codes = [names for key, names in cli.guard.inputs.items() if key.startswith("model.reward ")]
            _report_failure(cli, [file for names in codes for file in names] if isinstance(error, RewardError) else [])
            return FAILED
        except Exception as error:
            if checkpoints.training:
                return _fail(cli, watch, error)
            _refuse(cli, error)
            raise
        else:
            leave_together()
            if not cli.trainer.fit_loop.done:
                return _fail(cli, watch, RuntimeError("Training ended early. Did a callback raise StopIteration?"))
    try:
        return _report_outcome(cli)
    except KeyboardInterrupt:
        if is_first_process():
            say(f"Stopped. {last_words(cli.folder)}", error=True)
        return 128 + signal.SIGINT


def rehearse(cli: RecipeCLI) -> None:
    """Do in this process what :func:`train` does before it loads weights; raise UserError for what it would refuse."""
    try:
        rehearse_setup(cli.trainer, cli.model, cli.datamodule)
    except Exception as error:
        _refuse(cli, error)
        raise


def _fail(cli: RecipeCLI, watch: Watch, error: BaseException) -> int:
    if not watch.report_death():
        if is_deliberate(error):
            report([str(error)])
        else:
            traceback.print_exception(error)
        _report_failure(cli)
    watch.stop(GRACE_S)
    return FAILED


def leave_together() -> None:
    """Wait for all ranks, then close their process group; a rank that exits alone may abort the others' threads."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _finish(cli: RecipeCLI, completed: bool) -> None:
    """Call ``finish(trainer, module, completed)`` of every callback that has it; on rank 0 only."""
    for callback in declared(cli.trainer).callbacks:
        if (finish := getattr(callback, "finish", None)) is not None:
            finish(cli.trainer, cli.model, completed)


def _is_lost(cli: RecipeCLI) -> bool:
    """Return True and report it if the run folder was renamed or deleted; write a deleted recipe again."""
    is_kept = cli.keeper.keep_recipe(cli.folder)
    if not cli.lock.has_moved(cli.folder):
        return not is_kept
    report([f"{cli.folder} was renamed or deleted during training. The new folder has only what was written since."])
    return True


def _report_failure(cli: RecipeCLI, edited: Sequence[str] = ()) -> None:
    if is_first_process():
        _is_lost(cli)
        _finish(cli, completed=False)
        say(f"Training failed. {last_words(cli.folder, edited)}", error=True)


def _refuse(cli: RecipeCLI, error: Exception) -> None:
    """Raise UserError for an error that stops a run before training; return for other kinds of errors."""
    if isinstance(error, MisconfigurationException | LoadError):
        raise UserError(str(error)) from error
    if (place := error_in_user_code(error)) is not None:
        raise UserError(place) from error
    if isinstance(error, AttributeError | TypeError):  # a callback may need another kind of module
        raise UserError(f"{type(error).__name__}: {one_line(error)} (--debug shows the traceback)") from error
    if cli.ckpt_path is not None and isinstance(error, RuntimeError | ValueError | KeyError):
        raise UserError(f"Cannot continue from ckpt_path={cli.ckpt_path}: {one_line(error)}") from error
    if isinstance(error, RuntimeError | ValueError):
        raise UserError(str(error)) from error


def _report_outcome(cli: RecipeCLI) -> int:
    checkpoints = cli.checkpoints
    stopped = checkpoints.interrupted or checkpoints.terminated
    status = checkpoints.status or 128 + (signal.SIGTERM if checkpoints.terminated else signal.SIGINT)
    found = (getattr(callback, "unwritten", None) for callback in declared(cli.trainer).callbacks)
    unwritten = [line for line in found if line is not None]
    is_lost = _is_lost(cli)
    if is_first_process():
        _finish(cli, completed=not stopped)
        if unwritten:
            say(f"What could be written is in {cli.folder}.")
            report([f"{line} Free some disk space. {how_to_resume(cli.folder)}" for line in unwritten])
        elif checkpoints.unsaved is None:
            made = [name for name in WRITTEN if (cli.folder / name).exists()]
            if REPORT_NAME in made:
                say(f"The result: {cli.folder / REPORT_NAME}")
            if not stopped and EXPORT in made:
                say(f"The weights for diffusers: {cli.folder / EXPORT} (see its README.md)")
            more = ", ".join(name for name in made if name != REPORT_NAME and (stopped or name != EXPORT))
            say(f"{'What was saved since' if is_lost else 'More'} is in {cli.folder}: {more}.")
        has_next = not unwritten and checkpoints.unsaved is None and newest_checkpoint(cli.folder) is not None
        if stopped:
            word = "Terminated" if status != 128 + signal.SIGINT else "Interrupted"
            what = "nothing new was saved." if checkpoints.saved is None else f"{checkpoints.saved} is saved."
            say(f"{word}: {what}" if has_next else f"{word}: {what} {how_to_resume(cli.folder)}", error=True)
            if checkpoints.requeues:
                requeue_job()
        if has_next:
            rows = [] if cli.model.policy.edits else cli.datamodule.heldout_samples(1)
            prompt = rows[0]["prompt"] if rows else None
            is_unchecked = cli.model.evaluator.untrained is None
            commands = next_commands(cli.folder, prompt, cli.datamodule.has_heldout, stopped, is_unchecked)
            say("\n  ".join(["Next:", *(f"{line}  # {what}" for what, line in commands.items())]))
    if checkpoints.unsaved is not None or unwritten or is_lost or (not stopped and _nothing_was_scored(cli)):
        return FAILED
    return status if stopped else FINISHED


def _nothing_was_scored(cli: RecipeCLI) -> bool:
    """Return True and report it if the final held-out reward is NaN, so that the result is unknown."""
    if not math.isnan(cli.model.evaluator.latest.get("heldout/reward", 0.0)):
        return False
    if is_first_process():
        again = shell_line("lightning", "eval", cli.folder)
        report([f"No held-out image could be scored at the end. Fix the reward, then run: {again}"])
    return True
