# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Training entry point: check megatron's flags and ours before anything starts, then ``pretrain``.

``pretrain_gpt.py`` calls :func:`main`. Until training starts, user errors raise ``ValueError``;
:func:`main` prints them as one line and returns exit code 2.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, NoReturn, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.fine_grained_activation_offload.run_metadata import settings
from megatron.slipstream.fine_grained_activation_offload.warning_log import keep_warnings
from megatron.slipstream.integration.entry.arguments import print_help, use_one_device_queue
from megatron.slipstream.integration.entry.checks import naming_refusals, parse_and_validate
from megatron.slipstream.integration.entry.output import MegatronOutput
from megatron.slipstream.integration.record.monitor import Monitor
from megatron.slipstream.integration.record.run_files import RunFiles
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.launcher import (
    INTERRUPTED,
    check_launcher,
    launcher_number,
    log_to_stderr,
    rank,
    refuse,
    set_launcher_defaults,
)
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.options.model import offloads_with_our_engine
from megatron.slipstream.patches import table
from megatron.slipstream.patches.patching import applied
from megatron.slipstream.patches.table import Feature
from megatron.slipstream.patches.training_loop import CheckpointRefusedError, bound

logger = logging.getLogger(__name__)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Parse, check, train, report; return 0, 2 for a user error, or 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    log_to_stderr()
    keep_warnings()
    if "-h" in arguments or "--help" in arguments or "--help-all" in arguments:
        print_help(everything="--help-all" in arguments)
        return 0
    try:
        check_launcher()
        output = MegatronOutput(arguments, launcher_number("RANK", 0))
    except ValueError as error:
        return refuse(error)
    with output:
        return _parse_and_train(arguments, output)


def _parse_and_train(arguments: Sequence[str], output: MegatronOutput) -> int:
    try:
        set_launcher_defaults()
        use_one_device_queue(arguments)
        args = parse_and_validate(arguments)
        config = OffloadConfig.of(args)
        pretrain = _bind_pretrain(args)
        output.keep()
    except ValueError as error:
        return refuse(error)
    except KeyboardInterrupt:
        logger.info("interrupted before training")
        return INTERRUPTED
    try:
        run(args, config, pretrain)
    except CheckpointRefusedError as error:
        code = refuse(error, is_on_every_rank=False)
        if _has_nccl_peers():
            _exit_without_cleanup(code)
        _leave_process_groups()
        return code
    except KeyboardInterrupt:
        if rank() == 0:
            # Set when a checkpoint is loaded, and in each iteration.
            done = getattr(args, "curr_iteration", None) or getattr(args, "iteration", 0)
            logger.info("interrupted after iteration %d; %s", done, _last_checkpoint(args.save))
        if _has_nccl_peers():
            _exit_without_cleanup(INTERRUPTED)
        return INTERRUPTED
    except Exception:
        if not _has_nccl_peers():
            raise
        traceback.print_exc()
        _exit_without_cleanup(1)
    return 0


def _last_checkpoint(folder: Optional[str]) -> str:
    if folder is None:
        return "no checkpoint was saved, since --save is not set"
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    tracker = Path(get_checkpoint_tracker_filename(folder))
    if not tracker.exists():
        return f"no checkpoint was saved in {folder} yet (--save-interval)"
    return f"the last checkpoint in {folder} is of iteration {tracker.read_text().strip()}"


# Process


def _has_nccl_peers() -> bool:
    """Whether NCCL connects this rank to others."""
    group = torch.distributed
    return group.is_initialized() and group.get_world_size() > 1 and "nccl" in group.get_backend()


def _exit_without_cleanup(code: int) -> NoReturn:
    """Exit this failed rank, which has printed its error, without the interpreter's shutdown.

    In shutdown NCCL's communicators would wait for ranks that wait for this one, for minutes
    between hosts. A launcher terminates the others only after this one exits.
    """
    from megatron.training.global_vars import get_tensorboard_writer

    writer = get_tensorboard_writer()
    if writer is not None:
        writer.flush()  # Otherwise the last two minutes are lost.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# Training


def _bind_pretrain(args: Any) -> compat.Pretrain:
    from megatron.slipstream.integration.entry import providers

    with naming_refusals():
        return compat.bind_pretrain(args, providers.model_config(args))


def run(args: Any, config: OffloadConfig, pretrain: compat.Pretrain) -> None:
    """Train as the arguments specify, with the chosen engine; report however training ends."""
    from megatron.slipstream.integration import install
    from megatron.slipstream.integration.entry import providers

    # Also with the engine off, so that the two can be compared.
    table.apply(Feature.FUSED_ROTATION, Feature.SYNC_FREE_DISPATCH, Feature.EXPERT_METRICS)
    manager = None
    if offloads_with_our_engine(args):
        # RunFiles below writes the files, with the figures of all ranks.
        unwritten = replace(config, offload_report_path=None, offload_trace_path=None)
        manager = install.install(unwritten)
        manager.report.settings = settings(args, config)
    engine = None if manager is None else install
    files = RunFiles(config, rank(), engine, args.run_record_path, args.output_interval)
    monitor = Monitor(
        num_iterations=args.train_iters or 0,
        iteration=lambda: args.curr_iteration + 1,
        shows=rank() == launcher_number("WORLD_SIZE", 1) - 1,
        record=args.run_record_path is not None,
        bytes_offloaded=None if manager is None else lambda: _bytes_offloaded(manager.report),
        evaluation_length=_evaluation_length(args),
        log_interval=args.log_interval,
        backend=None if manager is None else manager.store.backend,
        between_iterations=files.write_between,
    )
    always = (table.CHECK_EXPERTS, table.NAME_REFUSALS, table.REPORT_EXPERTS)
    patches = [bound(patch, args) for patch in always]
    if args.eval_before_training:
        patches.append(bound(table.EVALUATE_FIRST, args))
    step = partial(providers.forward_step, monitor=monitor)
    update_wrapper(step, providers.forward_step)
    try:
        with contextlib.ExitStack() as stack:
            if manager is not None:
                stack.callback(install.uninstall)
            for context in (_writing_at_end(files, monitor), monitor, applied(patches)):
                stack.enter_context(context)
            pretrain(providers.datasets, step, monitor.finalizing)
    except SystemExit:
        _leave_process_groups()
        raise
    # A failing rank does not reach this: it would wait for work that others never do.
    _leave_process_groups()


@contextlib.contextmanager
def _writing_at_end(files: RunFiles, monitor: Monitor) -> Iterator[None]:
    try:
        yield
    except SystemExit as end:
        # Megatron exits this way at a given iteration, after a given time, or on a signal: all
        # ranks reach this. With a nonzero code, this rank may be the only one.
        if end.code:
            files.write_alone(monitor)
        else:
            files.write(monitor)
        raise
    except CheckpointRefusedError:
        raise
    except BaseException:
        files.write_alone(monitor)
        raise
    files.write(monitor)


def _leave_process_groups() -> None:
    from megatron.slipstream.integration.graphs.chunks import close_graphs

    close_graphs()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _evaluation_length(args: Any) -> int:
    """Return the micro-batches of one evaluation on one rank; 0 if it depends on the data."""
    if args.full_validation or not isinstance(args.eval_iters, int):
        return 0
    rows = args.eval_micro_batch_size * args.data_parallel_size
    return args.eval_iters * (args.eval_global_batch_size // rows)


def _bytes_offloaded(report: RankReport) -> int:
    outside = 0 if report.is_left_out else report.d2h_bytes
    return outside + sum(item.d2h_bytes for item in report.graphs.values())
