"""report.md and reward.png: what a run did, in numbers, and what to do with what it left."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import msgspec

from prorl_hpc.config.held_out import holds_out, told_held_out
from prorl_hpc.config.run_directory import RunDirectory
from prorl_hpc.config.schema import ProrlConfig
from prorl_hpc.observe.algorithm import algorithm_told
from prorl_hpc.observe.attempts import EndRecord, attempt_stories
from prorl_hpc.observe.markdown import markdown_table
from prorl_hpc.observe.reading import read_tolerantly
from prorl_hpc.observe.report_results import results_section
from prorl_hpc.observe.report_throughput import throughput_section
from prorl_hpc.observe.restarts import read_restarts
from prorl_hpc.observe.reward_plot import draw_reward_plot
from prorl_hpc.observe.run_figures import RunFigures
from prorl_hpc.observe.wording import clock, count, finishes_told, number


def write_report(run: RunDirectory) -> Path:
    """Write reward.png and report.md from what the run has left so far; returns the path of report.md.

    Works for a run that failed before its first step; one without a trainer of ours has no plot. Reads files only.
    """
    config, figures = run.load_config(), RunFigures.of(run)
    sections = [_head(run, config, figures)]
    if config.trainer.enabled:
        draw_reward_plot(figures, run.run_id, run.reward_plot)
        sections += [results_section(run, figures), "![reward per step](reward.png)"]
    sections += [
        _attempts(run),
        throughput_section(figures),
        _groups(config, figures),
        _policies(figures),
        _agreement(figures),
        _places(run, figures),
        _next_steps(run, config, figures),
    ]
    run.report_file.write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")
    return run.report_file


class _Order(msgspec.Struct):
    """What ``state/STOP`` holds."""

    ending: str
    reason: str


def how_it_ended(run: RunDirectory) -> tuple[str, str]:
    """``finished``, ``failed``, ``stopped``, ``suspended`` or ``unfinished`` (nothing says how it ended, or it still runs),
    and why, if that is told."""
    record = read_tolerantly(run.ending_file, EndRecord)
    if run.failure_file.exists():
        return "failed", ""  # the report tells more of it
    if run.finished_marker.exists():
        return "finished", ""
    if record is not None:
        return record.ending, record.reason
    order = read_tolerantly(run.stop_marker, _Order)
    if order is not None:
        return order.ending, order.reason
    if run.stop_marker.exists():  # made by hand
        return "stopped", run.stop_marker.read_text(encoding="utf-8", errors="replace").strip()
    return "unfinished", ""


def _head(run: RunDirectory, config: ProrlConfig, figures: RunFigures) -> str:
    status, why = how_it_ended(run)
    done = figures.steps[-1]["step"] if figures.steps else 0
    trainer = config.trainer
    training = [
        ("steps", f"{done} of {trainer.steps}"),
        ("batch", f"{trainer.groups_per_step} groups of {trainer.group_size} samples"),
    ]
    rows = [
        ("status", f"**{status}**" + (f" ({why})" if why else "")),
        *(training if trainer.enabled else [("trainer", "none: the rollout service alone")]),
        *([("algorithm", algorithm_told(trainer))] if trainer.enabled else []),
        *([("learning rate", f"{trainer.learning_rate:g}")] if trainer.enabled else []),
        ("model", f"{config.model.name}, served by `engine.kind={config.engine.kind}`"),
        ("task", config.task.name),
        *([("held-out rows", told_held_out(config.task))] if trainer.enabled and holds_out(config.task) else []),
        ("agent", _agent(config, figures)),
        ("cluster", config.cluster.kind),
        *(
            ("started again", f"{restart.name} {restart.what} ({restart.count} of {restart.allowed} restarts)")
            for restart in read_restarts(run)
        ),
    ]
    text = f"# Run {run.run_id}\n\n" + markdown_table(("", ""), rows)
    return text + _failure(run)


def _agent(config: ProrlConfig, figures: RunFigures) -> str:
    if config.agent.kind == "native":
        return "native: the task's own loop"
    ended = count(figures.bad_agent_exits, "rollout")
    told = f"{config.agent.name}, an outside agent"
    return f"{told}; **{ended} ended with an exit code other than 0**" if figures.bad_agent_exits else told


class _Failure(msgspec.Struct):
    """What the supervisor wrote about the first death."""

    name: str
    node: str = ""
    what: str = "ended the run"
    last_lines: list[str] = []
    log: str = ""


def _failure(run: RunDirectory) -> str:
    """The process that died and its last lines."""
    failure = read_tolerantly(run.failure_file, _Failure)
    if failure is None:
        return ""
    text = f"\n\n## What broke\n\n**{failure.name}**{f' on {failure.node}' if failure.node else ''} {failure.what}."
    if failure.last_lines:
        text += " Its last lines:\n\n```text\n" + "\n".join(line.rstrip() for line in failure.last_lines) + "\n```"
    return text + (f"\n\nThe whole log: `{failure.log}`" if failure.log else "")


def _attempts(run: RunDirectory) -> str:
    """Of a run that took more than one, or lost nodes."""
    stories = attempt_stories(run, living=True)
    if len(stories) < 2 and not any(story.lost_nodes for story in stories):
        return ""
    rows = [
        (
            str(story.number),
            "–" if story.begun is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(story.begun)),
            "–" if story.seconds is None else clock(story.seconds),
            story.how or "–",
            story.reason or "–",
            ", ".join(story.lost_nodes) or "–",
        )
        for story in stories
    ]
    return "## Attempts\n\n" + markdown_table(("attempt", "begun", "took", "ending", "reason", "lost nodes"), rows)


def _groups(config: ProrlConfig, figures: RunFigures) -> str:
    of_equal = "the value head alone tells them apart" if config.trainer.advantage == "gae" else "so no advantage"
    rows = []
    for key, meaning in (
        ("groups_accepted", "accepted: trained on"),
        ("groups_equal_rewards", f"of these: all samples had the same reward, {of_equal}"),
        ("groups_uniform", "uniform: dropped, all samples had the same reward, so nothing to learn"),
        ("groups_broken", "broken: too few samples finished"),
        ("groups_replaced", "replaced: another prompt was taken in place of a uniform or broken one"),
        ("groups_stale", "stale: accepted, but older than `trainer.staleness` allows, so not trained on"),
        ("groups_carried", "carried: went on into the next step"),
    ):
        if (total := figures.total(key)) is not None:
            rows.append((meaning, str(int(total))))
    text = "## Groups and failures\n\n" + markdown_table(("groups", "count"), rows) if rows else ""
    if figures.status_counts:
        statuses = ", ".join(f"{n} {status}" for status, n in sorted(figures.status_counts.items()))
        text += ("\n\n" if text else "## Groups and failures\n\n") + f"Rollouts, evaluations included: {statuses}."
    if figures.failures:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(figures.failures.items(), key=lambda item: -item[1]))
        text += ("\n\n" if text else "## Groups and failures\n\n") + f"Broken rollouts by kind: {kinds}."
    if figures.breakages:
        broken = [(str(b.count), b.stage or "–", b.kind, b.message) for b in figures.breakages]
        text += "\n\n" + markdown_table(("rollouts", "stage", "kind", "what was said"), broken)
    return text


def _policies(figures: RunFigures) -> str:
    """Side by side, of a run that has several."""
    if len(figures.policies) < 2:
        return ""
    header = ("policy", "done", "broken", "reward, mean", "seconds, mean", "generated tokens", "finish reasons")
    rows = [
        (
            policy.policy,
            str(policy.rollouts.get("done", 0)),
            str(policy.rollouts.get("failed", 0) + policy.rollouts.get("timed_out", 0)),
            number(policy.reward, 3),
            number(policy.seconds, 1),
            str(policy.generated_tokens),
            finishes_told(policy.finishes) or "–",
        )
        for policy in figures.policies
    ]
    note = "Rollouts of all attempts, evaluations included; means are over those that are done, seconds with queues."
    return f"## Policies side by side\n\n{note}\n\n" + markdown_table(header, rows)


def _agreement(figures: RunFigures) -> str:
    mean, largest = figures.mean("logprob_gap_mean"), figures.largest("logprob_gap_max")
    probe = figures.largest("probe_gap")
    if mean is None and largest is None and probe is None:
        return ""
    facts = [
        ("mean over trained tokens", mean),
        ("largest on a trained token", largest),
        ("largest on the probe", probe),
    ]
    rows = [(name, f"{value:.1e}") for name, value in facts if value is not None]
    note = "Difference of the engine's and the trainer's log-probabilities for the same tokens and weights, in nats."
    if figures.largest("staleness"):
        note += " Tokens that older weights wrote are among them: only the probe compares the same weights there."
    return f"## Engine and trainer agree\n\n{note}\n\n" + markdown_table(("", ""), rows)


def _places(run: RunDirectory, figures: RunFigures) -> str:
    places = [
        ("composed configuration", run.config_file),
        ("metrics, one line per step", run.metrics_file),
        ("TensorBoard", run.tensorboard),
        ("Weights & Biases", run.path / "wandb"),
        ("full trajectories (Parquet)", run.rollouts),
        ("checkpoints (Hugging Face)", run.checkpoints),
        ("logs per process", run.logs),
        ("reward curve", run.reward_plot),
    ]
    rows = [(what, f"`{path.relative_to(run.path)}`") for what, path in places if path.exists()]
    return f"## Where everything is\n\nUnder `{run.path}`:\n\n" + markdown_table(("", ""), rows)


def _next_steps(run: RunDirectory, config: ProrlConfig, figures: RunFigures) -> str:
    parts = []
    if figures.checkpoints:
        newest = figures.checkpoints[-1]
        python = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            f"model = AutoModelForCausalLM.from_pretrained({str(newest)!r})\n"
            f"tokenizer = AutoTokenizer.from_pretrained({str(newest)!r})"
        )
        parts.append(
            f"## Use the model\n\n{count(len(figures.checkpoints), 'checkpoint')} kept; the newest is `{newest.name}`.\n\n"
            f"```python\n{python}\n```\n\n```sh\nvllm serve {shlex.quote(str(newest))}\n```"
        )
    if how_it_ended(run)[0] != "finished":
        command = f"python -m prorl_hpc resume {shlex.quote(str(run.path))}"
        if not config.trainer.enabled:
            does = "starts the service again: all ids are free, the engine has its first weights, trajectories stay"
        elif figures.checkpoints:
            does = "continues from the newest checkpoint"
        else:
            does = "continues from the start: there is no checkpoint yet"
        parts.append(f"## Go on\n\n```sh\n{command}\n```\n\n{does}.")
    return "\n\n".join(parts)
