# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Requirements on the arguments of a training: learning rate, machine, data, files."""

from __future__ import annotations

from typing import Any, Optional

from megatron.slipstream.options.facts import DEFAULTS, Facts
from megatron.slipstream.options.model import offloads_with_our_engine
from megatron.slipstream.options.rules import (
    Condition,
    Predicate,
    Rule,
    always,
    option_rule,
    value_rule,
)


def _positive(value: Optional[float]) -> bool:
    return value is None or value > 0


def _in_training(rule: Rule) -> Rule:
    return rule._replace(when=lambda facts: not facts.skip_train and rule.when(facts))


def _rules_in(unit: str, counts: Predicate) -> tuple[Rule, ...]:
    """Return the rules of a training whose length is given in iterations or samples."""

    def decays_after_warmup(facts: Facts) -> bool:
        given, warmup = facts[f"lr_decay_{unit}"], facts[f"lr_warmup_{unit}"]
        decay = facts[f"train_{unit}"] if given is None else given
        # Another rule refuses a length that is not positive.
        return not _positive(given) or bool(warmup < int(decay))

    return (
        value_rule(
            f"lr_decay_{unit}",
            _positive,
            "is not positive",
            f"set --lr-decay-{unit} to 1 or more",
            counts,
        ),
        option_rule(
            f"lr_warmup_{unit}",
            lambda f: counts(f) and f.lr_warmup_fraction is None,
            decays_after_warmup,
            f"lr_warmup_{unit}={{lr_warmup_{unit}}} leaves nothing after the warm-up of a learning "
            f"rate that decays in train_{unit}={{train_{unit}}} or "
            f"lr_decay_{unit}={{lr_decay_{unit}}}",
            f"set --lr-warmup-{unit} to fewer, or --lr-decay-{unit} to more",
        ),
        option_rule(
            f"lr_wsd_decay_{unit}",
            lambda f: f.lr_decay_style == "WSD" and counts(f),
            lambda f: f[f"lr_wsd_decay_{unit}"] is not None,
            f"lr_wsd_decay_{unit} is not set, which lr_decay_style=WSD needs",
            f"set --lr-wsd-decay-{unit}, or another --lr-decay-style",
        ),
    )


_SCHEDULE_RULES: tuple[Rule, ...] = (
    option_rule("lr", always, lambda f: f.lr is not None, "lr is not set", "set --lr"),
    option_rule(
        "min_lr",
        always,
        lambda f: f.min_lr >= 0 and (f.lr is None or f.min_lr <= f.lr),
        "min_lr={min_lr} is not from 0 to lr={lr}",
        "set --min-lr to 0 or more, and at most --lr",
    ),
    option_rule(
        "lr_warmup_init",
        lambda f: f.lr is not None,
        lambda f: f.lr_warmup_init <= f.lr,
        "lr_warmup_init={lr_warmup_init} is above lr={lr}",
        "set --lr-warmup-init to at most --lr",
    ),
    value_rule(
        "lr_warmup_fraction",
        lambda fraction: fraction is None or fraction < 1,
        "leaves nothing after the warm-up",
        "set --lr-warmup-fraction to less than 1",
    ),
    *_rules_in("iters", lambda f: f.train_iters),
    *_rules_in("samples", lambda f: not f.train_iters and f.train_samples),
    value_rule("weight_decay", lambda w: w >= 0, "is negative", "set --weight-decay to 0 or more"),
    option_rule(
        "end_weight_decay",
        lambda f: None not in (f.start_weight_decay, f.end_weight_decay),
        lambda f: 0 <= f.start_weight_decay <= f.end_weight_decay,
        "start_weight_decay={start_weight_decay} is not from 0 to "
        "end_weight_decay={end_weight_decay}",
        "set --end-weight-decay to at least --start-weight-decay, and that to 0 or more",
    ),
    Condition(
        "with use_checkpoint_opt_param_scheduler", lambda f: f.use_checkpoint_opt_param_scheduler
    )("override_opt_param_scheduler", "one schedule is followed", "leave one of them out"),
)

SCHEDULE_RULES = tuple(map(_in_training, _SCHEDULE_RULES))
"""Requirements of megatron's ``OptimizerParamScheduler``, which it asserts after it has built the
model."""


# Machine, data and files


_without_gpu = Condition("without a GPU", lambda f: not f.has_gpu)


def _graphs_are_off(option: str, off: Any) -> Rule:
    """Return a rule against layer graphs without a GPU, where only chunk graphs are emulated."""
    # With packed sequences, the packing rules check layer graphs, with or without a GPU.
    return Condition("without a GPU", lambda f: not f.has_gpu and f.sequence_packing is None)(
        option,
        "CUDA graphs are captured from a GPU's streams",
        f"set {option}={off}, or leave it out",
        (None, False, off),
    )


def _is_positive(value: Optional[int]) -> bool:
    return value is not None and value > 0


MACHINE_RULES: tuple[Rule, ...] = (
    *Condition(
        "without a GPU", lambda f: not f.has_gpu and f.fine_grained_activation_offloading
    ).rows("""
        offload_engine in slipstream: megatron-core's engine is written for CUDA streams;
            set offload_engine=slipstream
        offload_backend in auto, cpu, cpu-lazy: there is no device memory to leave;
            set offload_backend=auto or cpu
    """),
    _without_gpu(
        "activation_memory_budget",
        "host memory stands in for the device's, and has no end of its own",
        "set the GiB that activations may use",
        lambda f: f.activation_memory_budget != "auto",
    ),
    _graphs_are_off("cuda_graph_impl", "none"),
    *(_graphs_are_off(f"{of}_cuda_graph", False) for of in ("enable", "external", "optimizer")),
    _without_gpu(
        "transformer_impl",
        "its kernels run on CUDA only",
        "set --transformer-impl local",
        lambda f: f.transformer_impl != "transformer_engine",
    ),
    Condition("with transformer_impl=local", lambda f: f.transformer_impl == "local")(
        "hybrid_layer_pattern",
        "other layers than attention, MLP and MoE need Transformer Engine",
        "use only * (attention), + (multi-latent attention), - (MLP) and E (MoE)",
        lambda f: not set(f.hybrid_layer_pattern or "") - set("*+-E|/"),
    ),
    option_rule(
        "eval_interval",
        lambda f: not (f.full_validation or f.skip_train),
        lambda f: f.eval_interval is not None,
        "eval_interval is not set, and megatron-core divides by it even if nothing is evaluated",
        "set --eval-interval to the iterations between evaluations (with --eval-iters 0 there is "
        "none)",
    ),
    value_rule(
        "train_iters",
        _is_positive,
        "is no number of iterations to train",
        "set --train-iters to 1 or more, or --train-samples",
        lambda f: not (f.skip_train or f.train_samples),
    ),
    value_rule("num_layers", _positive, "is no number of layers", "set --num-layers to 1 or more"),
    value_rule(
        "vocab_size",
        _positive,
        "is no number of tokens",
        "set --vocab-size to 1 or more, or --tokenizer-json",
    ),
    value_rule(
        "log_interval",
        _is_positive,
        "is not positive, and megatron-core divides by it",
        "set --log-interval to 1 or more iterations",
    ),
    Condition("with mock_data", lambda f: f.mock_data)(
        "data_path", "one source of data is read", "leave --mock-data out, or --data-path"
    ),
    # Without a GPU, our own core attention supports packed sequences; see cpu_modules.py.
    Condition(
        "with sequence_packing={sequence_packing} on a GPU",
        lambda f: f.has_gpu and f.sequence_packing is not None,
    )(
        "transformer_impl",
        "megatron-core's own attention takes no packed sequences",
        "set --transformer-impl transformer_engine",
        ("transformer_engine",),
    ),
    option_rule(
        "tensor_model_parallel_size",
        lambda f: (
            f.num_experts is not None
            and not f.skip_train
            and (f.hybrid_layer_pattern is None or "E" in f.hybrid_layer_pattern)
        ),
        lambda f: f.tensor_model_parallel_size == 1 or (f.sequence_parallel and f.has_gpu),
        "tensor_model_parallel_size={tensor_model_parallel_size} is not supported with "
        "num_experts={num_experts} and sequence_parallel={sequence_parallel} because "
        "megatron-core's experts train with sequence parallelism only, which needs a GPU",
        "set --tensor-model-parallel-size 1, or on a GPU --sequence-parallel",
    ),
    Condition("without a GPU", lambda f: not f.has_gpu and f.tensor_model_parallel_size > 1)(
        "sequence_parallel",
        "megatron-core's layers for tensor parallelism then ask for a CUDA device",
        "leave --sequence-parallel out",
    ),
    Condition(
        "without a GPU",
        lambda f: (
            not f.has_gpu
            and f.num_experts is not None
            and f.ckpt_format == "torch_dist"
            and (f.save is not None or f.load is not None)
            and not f.moe_sync_free_experts
        ),
    )(
        "moe_grouped_gemm",
        "the grouped GEMM for the CPU has no sharded state for ckpt_format=torch_dist",
        "set --ckpt-format torch, or leave --moe-grouped-gemm out",
    ),
    Condition("with eval_iters=0", lambda f: f.eval_iters == 0 and not f.full_validation)(
        "eval_before_training",
        "nothing is evaluated",
        "set --eval-iters to 1 or more, or leave --eval-before-training out",
    ),
    Condition("with skip_train", lambda f: f.skip_train)(
        "eval_before_training",
        "there is no training to evaluate before",
        "leave --eval-before-training out: --skip-train evaluates",
    ),
    value_rule(
        "output_interval",
        lambda iterations: iterations >= 0,
        "is negative",
        "set 1 or more iterations, or 0 to write at the end only",
    ),
    Rule(
        "output_interval",
        "warning",
        "output_interval={output_interval} has no effect because no file is written",
        "name one with --run-record-path, --offload-report-path or --offload-trace-path, or leave "
        "it out",
        lambda f: f.output_interval != DEFAULTS["output_interval"],
        lambda f: (
            f.run_record_path
            or (offloads_with_our_engine(f) and (f.offload_report_path or f.offload_trace_path))
        ),
    ),
)
"""Requirements on the arguments for training on this machine; they also read ``has_gpu``."""


# Other findings about training flags: see integration/entry/checks.py.

STAYS = Rule(
    "stays-on-the-device",
    "warning",
    "offload_modules: {names} of the layers that CUDA graphs capture (cuda_graph_impl, "
    "cuda_graph_modules) stay on the device, since graphs keep what they take in and give out",
    "leave them out, or capture other parts",
)

NO_EFFECT = Rule(
    "no-effect",
    "warning",
    "{names}: no effect without fine_grained_activation_offloading",
    "add --fine-grained-activation-offloading, or leave them out",
)

NO_EFFECT_ON_MEGATRON = Rule(
    "no-effect-on-megatron",
    "warning",
    "{names}: no effect with offload_engine=megatron, which has no such options",
    "set offload_engine=slipstream, or leave them out",
)

REFUSED_BY_MEGATRON = Rule(
    "refused-by-megatron",
    "error",
    "megatron-core's own validation: {message}",
    "change the flag that this is about; megatron-core stops at the first, so look again",
)
