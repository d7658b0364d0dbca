"""The ablations: what each asks, what is run for it, and what is compared.

Their workloads are those of conf/bench with all times a third as long, the engine's too, so that one takes three minutes on
two cores; the simulator (``prorl-hpc simulate``) says the same of the ratios at full length.
"""

from __future__ import annotations

import importlib.util
import statistics

from prorl_hpc.bench.ablation_parts import Ablation, Measure, Variant
from prorl_hpc.bench.scaling_records import LoadOrder, PointFigures
from prorl_hpc.bench.scaling_settings import WHOLE_TURNS
from prorl_hpc.messages.batch import Refill, WhenFull


def _slots(init: int, ready: int, run: int, evaluation: int) -> tuple[str, ...]:
    """Of a worker."""
    sizes = {"init": init, "ready": ready, "run": run, "eval": evaluation}
    return tuple(f"rollout.{pool}_slots={size}" for pool, size in sizes.items())


_ENGINE = (
    "++engine.script.first_token_s=0.02",
    "++engine.script.token_s=0.0033",
    f"++{WHOLE_TURNS}",
)
"""A third of 0.06 s and 10 ms; turns are as long as their rows say."""
_MIXED = (
    "bench=mixed",
    *_ENGINE,
    "task.options.kinds.swe.init_s=lognormal:1:0.5",
    "task.options.kinds.swe.tool_s=lognormal:0.17:0.6",
    "task.options.kinds.swe.eval_s=lognormal:10:0.6",
    "task.options.kinds.math.init_s=constant:0.03",
    "task.options.kinds.math.tool_s=lognormal:0.07:0.5",
    "task.options.kinds.math.eval_s=constant:0.17",
)
"""``mixed`` at a third of its times."""
_STRAGGLING = (
    *_MIXED,
    "task.options.kinds.swe.init_s=lognormal:0.5:0.5",
    "task.options.kinds.swe.tool_s=lognormal:0.2:0.6",
    "task.options.kinds.swe.eval_s=lognormal:1:0.6",
    "task.options.kinds.swe.spread=0.7",
    "task.options.kinds.math.tool_s=lognormal:0.2:0.6",
    "task.options.kinds.math.uniform_share=0.5",
    "task.options.kinds.math.spread=0.7",
)
"""``mixed`` with quick evaluations, and samples of a group that differ."""


def _steady(figures: PointFigures) -> float | None:
    return figures.steady_per_s or None


def _batch_s(figures: PointFigures) -> float | None:
    return statistics.fmean(figures.batch_s) if figures.batch_s else None


def _freed_s(figures: PointFigures) -> float | None:
    return max(figures.freed_s) if figures.freed_s else None


def _turns(figures: PointFigures) -> float | None:
    """Over the whole run: a real engine shares itself among all rollouts, so that these few end in bunches, and the rate of
    the middle 80 % hangs on where it cuts them."""
    if not figures.steady_per_s:
        return None
    return figures.turns_per_s / figures.steady_per_s * figures.per_s or None


def _hits(figures: PointFigures) -> float | None:
    return None if figures.prefix_hit_rate is None else 100 * figures.prefix_hit_rate


_PAPER_OURS = "0.37 instances/s and 78 % GPU use in full"
_NO_RATE = "too few rollouts were done for a steady rate"
_NO_BATCH = "no batch became full"

POOLS = Ablation(
    name="pools",
    question="What do three stages with slots of their own bring, against slots that are held from INIT to EVAL?",
    overrides=(*_MIXED, *_slots(8, 6, 6, 48)),
    load=LoadOrder(rollouts=120),
    quick_load=LoadOrder(rollouts=90),
    variants=(
        Variant("stages", "three stages"),
        # A steady rate needs fewer rollouts where each takes so much longer.
        Variant("coupled", "one coupled pool", ("rollout.coupled=true",), share=0.4),
    ),
    measures=(Measure("rollouts/s", "rollouts/s", _steady, goal=3.0, absent=_NO_RATE, rate=True),),
    set_up="mixed at a third of its times; a worker has 6 slots for the RUNs, and 8 for INIT and 48 for EVAL beside them, or its 6 are held "
    "from INIT to the end of EVAL",
    differs="the paper has no figure for this; with as many slots as all stages have together a coupled pool would lose less, and "
    "hold as many sandboxes",
)

BATCH = Ablation(
    name="batch",
    question="How soon is a batch of informative groups there?",
    overrides=(
        *_STRAGGLING,
        *_slots(18, 8, 36, 36),
    ),
    load=LoadOrder(batches=3, groups=6, group_size=4, max_parallel_groups=12, when_full=WhenFull.CARRY, train_s=0.5),
    quick_load=LoadOrder(
        batches=2, groups=6, group_size=4, max_parallel_groups=12, when_full=WhenFull.CARRY, train_s=0.5
    ),
    variants=(
        Variant("asynchronous", "refill at once, early end, groups in flight carried on"),
        Variant(
            "synchronous",
            "rounds of as many groups as are wanted",
            load=(("refill", Refill.IN_ROUNDS), ("when_full", WhenFull.CANCEL), ("max_parallel_groups", 0)),
        ),
        Variant(
            "oversampled",
            "rounds with as many spare groups",
            load=(("refill", Refill.IN_ROUNDS), ("when_full", WhenFull.CANCEL)),
        ),
    ),
    measures=(
        Measure(
            "time to an informative batch",
            "s",
            _batch_s,
            less=True,
            goal=2.9,
            against="synchronous",
            paper="80 minutes a step synchronous, 28 asynchronous: 2.9 x, on 32 GPUs",
            absent=_NO_BATCH,
            samples=lambda figures: figures.batch_s,
        ),
    ),
    set_up="mixed with samples that differ and half of the groups uniform; batches of 6 informative groups of 4, 36 RUN slots",
    differs="the paper's step is 32 groups of 8 on 32 GPUs, training included; here it is the wait for the batch alone",
)

CLEANUP = Ablation(
    name="cleanup",
    question="What is lost where work that nobody waits for any more goes on?",
    overrides=(
        "bench=swe-like",
        *_ENGINE,
        *_slots(8, 4, 12, 12),
        "task.options.kinds.swe.init_s=constant:0.1",
        "task.options.kinds.swe.turns=uniform:4:8",
        "task.options.kinds.swe.turn_tokens=constant:60",
        "task.options.kinds.swe.tool_s=lognormal:0.7:0.6",
        "task.options.kinds.swe.eval_s=constant:0.2",
        "task.options.kinds.swe.uniform_share=0.2",
        "task.options.kinds.swe.spread=1.2",
        "rollout.heartbeat_s=0.1",
    ),
    load=LoadOrder(batches=6, groups=3, group_size=2, max_parallel_groups=9, train_s=1.5),
    quick_load=LoadOrder(batches=3, groups=3, group_size=2, max_parallel_groups=9, train_s=1.5),
    variants=(
        Variant("on", "cancelled work is stopped at once"),
        Variant("off", "cancelled work runs to its end", ("rollout.abort_cancelled=false",)),
    ),
    measures=(
        Measure(
            "time to a batch",
            "s",
            _batch_s,
            less=True,
            goal=1.0,
            strictly=True,
            paper="0.37 to 0.30 instances/s (1.23 x), 78 to 65 % GPU use",
            absent=_NO_BATCH,
            samples=lambda figures: figures.batch_s,
        ),
    ),
    own=(
        Measure(
            "longest time until engines are free of what a full batch cancelled",
            "s",
            _freed_s,
            less=True,
            goal=1.0,
            absent="no break between two batches was sampled",
        ),
    ),
    set_up="swe-like with samples that differ much; batches of 3 groups of 2, 9 groups at a time, cancelled when the batch "
    "is full; 12 RUN slots",
    differs="14B on 8 GPUs in the paper, where each cancelled job holds a GPU's time; here slots of a scripted engine, "
    "which is the busier without the switch: cancelled work counts as work",
)

READY = Ablation(
    name="ready",
    question="What do sandboxes bring that are prepared before a RUN slot is free?",
    overrides=(*_MIXED, *_slots(8, 6, 6, 48)),
    load=LoadOrder(rollouts=90),
    quick_load=LoadOrder(rollouts=60),
    variants=(
        Variant("buffered", "6 prepared sandboxes a worker"),
        Variant("unbuffered", "INIT begins when a RUN slot waits", ("rollout.ready_slots=0",)),
    ),
    measures=(Measure("rollouts/s", "rollouts/s", _steady, goal=1.0, strictly=True, absent=_NO_RATE, rate=True),),
    set_up="mixed at a third of its times, 6 RUN slots a worker",
    differs="the paper has no figure for this; its successor (arXiv 2605.24220) has such a buffer",
)

SHELL = Ablation(
    name="shell",
    question="What does the way in which commands reach the shell cost?",
    overrides=(
        "bench=swe-like",
        *_ENGINE,
        *_slots(4, 4, 4, 16),
        "task.options.kinds.swe.init_s=constant:0.5",
        "task.options.kinds.swe.tool_s=lognormal:0.1:0.5",
        "task.options.kinds.swe.eval_s=constant:1",
        "sandbox.warm=2",
    ),
    load=LoadOrder(rollouts=40),
    quick_load=LoadOrder(rollouts=20),
    variants=(
        Variant("own", "our shell", ("sandbox.shell=own",)),
        Variant("tmux", "a shell in tmux", ("sandbox.shell=tmux",)),
    ),
    measures=(
        Measure(
            "time of a tool call beyond its command's",
            "s",
            lambda figures: figures.tool_call_s,
            less=True,
            goal=1.0,
            strictly=True,
            paper="0.78 s a shell action in tmux, 0.42 s without (1.9 x)",
            absent="no tool call was made",
        ),
        Measure(
            "rollouts/s",
            "rollouts/s",
            _steady,
            goal=1.0,
            strictly=True,
            paper="0.37 to 0.29 instances/s (1.28 x), 78 to 68 % GPU use",
            absent=_NO_RATE,
            rate=True,
        ),
    ),
    set_up="swe-like with short commands, 4 RUN slots a worker; the tmux shell is bash typed into a tmux whose screen is looked at "
    "every 0.5 s (sandbox.tmux_poll_s), so that tabs are spaces there, bytes that are no UTF-8 do not come through, of long output the "
    "last 10,000 lines are left, and the exit code of a command that ends its shell (`exit 3`) is known only if tmux tells it",
    differs="the paper's actions are those of its agent; here commands sleep, and the 0.5 s are those of OpenHands' tmux shell",
)


def balancing(*, real: bool) -> Ablation:
    """With vLLM and a real model where it is installed, else with the scripted engine's prefix cache, unless the series chooses
    an engine; the point says which answered."""
    return Ablation(
        name="balancing",
        question="What does it bring that a rollout stays with the least loaded LLM server?",
        engine=("engine=vllm", "model=smollm2", "engine.threads=1", "engine.kv_cache_mib=1024")
        if real
        else ("engine=scripted",),
        overrides=(
            "bench=swe-like",
            *_ENGINE,
            "++engine.script.first_token_s_per_1k=0.5",
            "++engine.script.cache_tokens=60000",
            *_slots(4, 4, 8, 8),
            "engine.servers_per_node=2",
            "engine.record_requests=true",
            "model.max_context_tokens=4096",
            "task.options.kinds.swe.init_s=constant:0",
            "task.options.kinds.swe.turns=uniform:4:8",
            "task.options.kinds.swe.turn_tokens=constant:16",
            "task.options.kinds.swe.tool_s=constant:0.05",
            "task.options.kinds.swe.prompt_tokens=uniform:100:300",
            "task.options.kinds.swe.observation_chars=uniform:200:400",
            "task.options.kinds.swe.eval_s=constant:0",
        ),
        load=LoadOrder(rollouts=32),
        quick_load=LoadOrder(rollouts=16),
        variants=(
            Variant("sticky", "least in flight, sticky", ("rollout.balancing=least_in_flight",)),
            Variant("per-task", "round-robin per rollout", ("rollout.balancing=round_robin",)),
            Variant("per-request", "round-robin per request", ("rollout.balancing=round_robin_per_request",)),
        ),
        measures=(
            Measure(
                "turns/s of the whole run",
                "turns/s",
                _turns,
                goal=1.0,
                strictly=True,
                against="per-request",
                paper="0.37 to 0.25 instances/s (1.48 x), 78 to 42 % GPU use without load balancing",
                absent="no turn was made",
            ),
            Measure(
                "prefix-cache hits",
                "%",
                _hits,
                points=True,
                goal=0.0,
                strictly=True,
                against="per-request",
                absent="the engine does not count them",
            ),
        ),
        set_up="two servers, vLLM with SmolLM2-135M or, without vLLM, scripted with a prefix cache, unless the command chose an "
        "engine; rollouts of 4 to 8 turns",
        differs="14B on 8 GPUs in the paper, and what it balanced without is not told; here the engine of the points",
    )


BALANCING = balancing(real=importlib.util.find_spec("vllm") is not None)
ABLATIONS = {ablation.name: ablation for ablation in (BALANCING, SHELL, CLEANUP, POOLS, BATCH, READY)}
