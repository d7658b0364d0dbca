"""How outside agents begin, end and fail, with small programs in their place."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from hermes_chat import bash
from outside_bed import (
    ROW,
    SERVER,
    Bed,
    Played,
    RecordedLLM,
    check_exact,
    conversations,
    settings,
    shipped,
    trajectory_of,
)

from prorl_hpc.agents import outside
from prorl_hpc.config.schema import AgentConfig, TaskConfig
from prorl_hpc.messages.control import Discard, Discarded, StageFinished, StartInit, StartRun
from prorl_hpc.messages.errors import InferenceError
from prorl_hpc.messages.inference import Completion
from prorl_hpc.messages.rollout import Failure, FailureKind, RolloutSpec, SamplingParams, Stage
from prorl_hpc.messages.trajectory import Finish
from prorl_hpc.tasks.solve import Solve

ASK = """
import json, sys, urllib.error, urllib.request

def ask(messages, key="{key}", url="{openai_url}"):
    body = json.dumps({"model": "{model}", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]

def user(text):
    return {"role": "user", "content": text}

def said(text):
    return {"role": "assistant", "content": text}
"""
"""A client of a few lines, for programs that run on the node's Python."""


def program(code: str, **changes: object) -> AgentConfig:
    files = {"agent.py": ASK + textwrap.dedent(code)}
    return settings(
        {"kind": "outside", "name": "small", "command": ["/usr/bin/python3", "agent.py"], "files": files} | changes
    )


def shell(script: str, **changes: object) -> AgentConfig:
    return settings({"kind": "outside", "name": "small", "command": ["sh", "-c", script]} | changes)


async def test_a_program_that_is_not_there_fails_the_rollout(bed: Bed) -> None:
    nowhere = settings({"kind": "outside", "name": "small", "command": ["nowhere", "--fast"]})
    said = refused(await bed.play(nowhere, bed.llm(str)))
    assert said.startswith("agent small could not be started: nowhere: No such file or directory. It must be in")
    assert "agent.image" in said and "agent.binds" in said and "agent.env.PATH" in said


async def test_a_program_that_never_calls_its_model_fails_the_rollout(bed: Bed) -> None:
    said = refused(await bed.play(shell("echo 'ImportError: no pandas' >&2; exit 3"), bed.llm(str)))
    assert said.startswith(
        "agent small ended with exit code 3 and never called its model; its last output: ImportError: no"
    )
    assert "(agent.command: sh -c echo" in said
    assert "exit code 0 and never called" in refused(await bed.play(shell("true"), bed.llm(str)))


async def test_what_is_told_of_a_long_output_is_its_end(bed: Bed) -> None:
    script = "for n in $(seq 500); do echo \"│ line $n │\"; done; echo; echo 'OSError: the cause'; exit 1"
    said = refused(await bed.play(shell(script), bed.llm(str)))
    assert "line 500 | OSError: the cause (agent.command" in said and "line 400" not in said
    assert len(said) < 500


async def test_a_first_prompt_that_does_not_fit_is_what_is_told(bed: Bed) -> None:
    code = """
        try:
            ask([user('word ' * 500)])
        except urllib.error.HTTPError as error:
            sys.exit(f'no: {error.code}')
    """
    said = refused(await bed.play(program(code), bed.llm(str), max_context_tokens=200))
    assert said.startswith(
        "agent small ended with exit code 1 and never had an answer of its model, whose last call was refused:"
    )
    assert "model.max_context_tokens=200" in said
    assert "no: 400" in said and "never called" not in said


def refused(played: Played) -> str:
    """Why the task failed in RUN."""
    assert played.failure is not None and played.reward is None
    assert (played.failure.stage, played.failure.kind) == (Stage.RUN, FailureKind.TASK)
    return played.failure.message


async def test_a_task_without_words_is_refused_before_its_sandbox_starts(bed: Bed) -> None:
    bed.handler = StagedTask()  # type: ignore[assignment]
    played = await bed.play(shell("true"), bed.llm(str))
    assert played.failure is not None and played.failure.stage is Stage.INIT
    assert "has no method instruction(row)" in played.failure.message


class StagedTask:
    """A task that only a loop of its own can play."""

    def check_row(self, row: object) -> None:
        pass


async def test_a_crash_later_is_scored_without_an_answer(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    llm = bed.llm(lambda prompt: "answer: 4711")
    code = "ask([user('hello')]); raise SystemExit('it broke')"
    with caplog.at_level(logging.WARNING):
        played = await bed.play(program(code), llm)
    assert played.reward == 0.0
    assert played.metrics["agent_exit_code"] == 1 and played.metrics["answered"] == 0
    assert "it broke" in caplog.text
    assert played.trajectory.finish is Finish.ENVIRONMENT
    check_exact(played.trajectory, llm)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("last_message", "print(7); ask([user('hello')])"),
        ("stdout", "ask([user('hello')]); print('to people', file=sys.stderr); print('answer: 4711')"),
        (
            "file:out/answer.txt",
            "ask([user('hello')]); import os; os.mkdir('out'); open('out/answer.txt', 'w').write('4711')",
        ),
    ],
)
async def test_where_the_answer_is(bed: Bed, answer: str, code: str) -> None:
    played = await bed.play(program(code, answer=answer), bed.llm(lambda prompt: "answer: 4711"))
    assert played.reward == 1.0
    assert played.trajectory.finish is Finish.ANSWER


async def test_a_check_in_a_fresh_sandbox_has_the_agents_outputs(bed: Bed) -> None:
    bed.handler = Solve(TaskConfig(name="solve"))  # type: ignore[assignment]
    row = {
        "id": "row-0",
        "prompt": "Sort in.txt into out.txt.",
        "files": {"in.txt": "b\na\n"},
        "check": "sort in.txt | cmp - out.txt && ! test -e scratch",
        "fresh": True,
        "outputs": ["out.txt", "missing.txt"],
    }
    code = "ask([user('hello')]); open('scratch', 'w').close(); open('out.txt', 'w').write({!r})"
    played = await bed.play(program(code.format("a\nb\n")), bed.llm(lambda prompt: "hi"), row=row)
    assert played.reward == 1.0, played.failure
    played = await bed.play(program(code.format("b\n")), bed.llm(lambda prompt: "hi"), "rollout-1", row)
    assert played.reward == 0.0, played.failure


async def test_an_answer_that_was_not_left_is_none(bed: Bed) -> None:
    played = await bed.play(program("ask([user('hello')])", answer="file:answer.txt"), bed.llm(lambda prompt: "hi"))
    assert played.reward == 0.0 and played.metrics["answered"] == 0


async def test_sub_agents_and_a_compacted_history_are_branches(bed: Bed) -> None:
    llm = bed.llm(lambda prompt: f"turn {len(llm.calls)}")
    code = """
        main = [user("the task")]
        main.append(said(ask(main)))                                  # turn 0
        helper = [user("a question for a sub-agent")]
        helper.append(said(ask(helper)))                              # turn 1, a conversation of its own
        main.append(user("the sub-agent said: " + helper[-1]["content"]))
        main.append(said(ask(main)))                                  # turn 2
        helper.append(user("and then?"))
        ask(helper)                                                   # turn 3
        again = [*main[:2], user("another way")]
        ask(again)                                                    # turn 4, leaves the main one after its first turn
        ask([user("summary of all before"), user("go on")])           # turn 5, compacted
    """
    played = await bed.play(program(code), llm)
    check_exact(played.trajectory, llm)
    texts = [[m.content for m in one.messages if m.role == "assistant"] for one in conversations(played.trajectory)]
    assert texts == [["turn 0", "turn 2"], ["turn 1", "turn 3"], ["turn 0", "turn 4"], ["turn 5"]]
    # What the third shares with the first is trained in the first alone.
    assert [sum(s.trained for s in one.segments) for one in conversations(played.trajectory)] == [2, 2, 1, 1]


async def test_a_cancelled_run_leaves_neither_program_nor_sandbox(bed: Bed) -> None:
    """The call in flight is aborted in the engine, too."""
    asked, cancelled = asyncio.Event(), asyncio.Event()

    class SlowLLM(RecordedLLM):
        async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
            if not self.calls:
                return await super().generate(token_ids, sampling)
            asked.set()
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            raise AssertionError("unreachable")

    llm = SlowLLM(bed.chat, lambda prompt: "hi")
    code = "import subprocess; subprocess.Popen(['sleep', '1000']); ask([user('hello')]); ask([user('hello again')])"
    stages = bed.stages(program(code), llm)
    spec = RolloutSpec("rollout-0", "file_quest", ROW)
    stages.start_init(StartInit(spec, 60))
    await bed.reports.of("rollout-0")
    stages.start_run(StartRun("rollout-0", SERVER, 60))
    async with asyncio.timeout(60):
        await asked.wait()
    stages.discard(Discard("rollout-0"))
    discarded = await bed.reports.of("rollout-0")
    assert isinstance(discarded, Discarded)
    assert cancelled.is_set()
    assert trajectory_of(discarded).num_trained_tokens > 0  # what was generated until then
    await stages.close()
    assert stages.sandboxes == 0  # a sandbox that stops proves that none of its processes is left


async def test_the_budget_of_run_ends_a_program(bed: Bed) -> None:
    stages = bed.stages(program("ask([user('hello')]); import time; time.sleep(1000)"), bed.llm(lambda prompt: "hi"))
    stages.start_init(StartInit(RolloutSpec("rollout-0", "file_quest", ROW), 60))
    await bed.reports.of("rollout-0")
    stages.start_run(StartRun("rollout-0", SERVER, 3))
    report = await bed.reports.of("rollout-0")
    assert isinstance(report, StageFinished) and report.timed_out and report.failure is not None
    assert "run did not end within its budget of 3 s" in report.failure.message
    await stages.close()


async def test_a_program_that_goes_on_when_its_calls_are_used_up_is_killed(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "_LEAVE_S", 0.3)
    code = """
        while True:
            try:
                ask([user("hello")])
            except urllib.error.HTTPError as error:
                assert error.code == 403, error.read()
    """
    llm = bed.llm(lambda prompt: "hi")
    played = await bed.play(program(code, max_calls=2), llm)
    assert played.metrics["agent_exit_code"] == 137
    assert played.trajectory.finish is Finish.TURNS
    check_exact(played.trajectory, llm)
    assert len(llm.calls) == 2


async def test_a_broken_llm_server_is_its_own_failure(bed: Bed) -> None:
    code = """
        while True:
            try:
                ask([user("hello")])
            except urllib.error.HTTPError:
                pass
    """
    played = await bed.play(program(code), bed.llm(lambda prompt: InferenceError("server-0 is gone")))
    assert played.failure == Failure(Stage.RUN, FailureKind.INFERENCE, "server-0 is gone")


async def test_without_the_rollouts_key_nobody_is_answered(bed: Bed) -> None:
    code = """
        try:
            ask([user("hello")], key="guess")
        except urllib.error.HTTPError as error:
            assert error.code == 401
            ask([user("it is me")])
    """
    llm = bed.llm(lambda prompt: "hi")
    played = await bed.play(program(code), llm)
    assert played.metrics["agent_exit_code"] == 0 and len(llm.calls) == 1


async def test_the_instruction_is_told_in_full_and_nothing_in_it_is_filled_in(bed: Bed) -> None:
    bed.handler.instruction = lambda row: 'Say {key} {openai_url}\n$HOME \'and "so" on ☂'  # type: ignore[method-assign]
    code = "ask([user(open('{instruction_file}').read()), user(sys.argv[1])])"
    llm = bed.llm(lambda prompt: "hi")
    command = ["/usr/bin/python3", "agent.py", "{instruction}"]
    await bed.play(program(code, command=command), llm)
    assert llm.prompts[0].count('Say {key} {openai_url}\n$HOME \'and "so" on ☂') == 2


@pytest.mark.apptainer
@pytest.mark.parametrize("bed", ["apptainer"], indirect=True)
async def test_there_is_no_other_network(bed: Bed) -> None:
    code = """
        import socket
        names = sorted(name for _, name in socket.if_nameindex())
        try:
            socket.create_connection(("198.51.100.1", 80), 2)
        except OSError as error:
            ask([user(f"{names} {error.strerror}")])
    """
    llm = bed.llm(lambda prompt: "hi")
    await bed.play(program(code), llm)
    assert "['lo'] Network is unreachable" in llm.prompts[0]


async def test_parallel_rollouts_do_not_mix(bed: Bed) -> None:
    code = "words = open('{instruction_file}').read(); m = [user(words)]; m.append(said(ask(m))); ask([*m, user('more ' + words)])"
    llms = [bed.llm(lambda prompt: "hi") for _ in range(3)]
    rows = [{**ROW, "question": f"rollout number {n}"} for n in range(3)]
    played = await asyncio.gather(
        *(
            bed.play(program(code), llm, f"rollout-{n}", row)
            for n, (llm, row) in enumerate(zip(llms, rows, strict=True))
        )
    )
    for n, (one, llm) in enumerate(zip(played, llms, strict=True)):
        check_exact(one.trajectory, llm)
        assert llm.prompts[1].count(f"rollout number {n}") == 2


@pytest.mark.apptainer
@pytest.mark.parametrize("bed", ["apptainer"], indirect=True)
async def test_an_image_without_python(bed: Bed, tmp_path: Path) -> None:
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hello"}]})
    call = f"wget -q -O - --header 'Authorization: Bearer {{key}}' --header 'Content-Type: application/json' --post-data '{body}' {{openai_url}}/chat/completions"
    config = shell(f"busybox {call}", image=str(busybox_image(tmp_path / "image")), answer="stdout")
    llm = bed.llm(lambda prompt: "answer: 4711")
    played = await bed.play(config, llm)
    assert played.metrics["agent_exit_code"] == 0 and len(llm.calls) == 1


def busybox_image(path: Path) -> Path:
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox-static is not installed (scripts/setup.sh test installs it)")
    # fmt: off
    for name in (
        "bin", "dev", "etc", "home", "mnt", "proc", "root", "sys", "tmp", "usr", "var/tmp", "workspace", ".prorl", ".singularity.d",
    ):
        # fmt: on
        (path / name).mkdir(parents=True)
    shutil.copy(busybox, path / "bin" / "busybox")
    for name in ("sh", "env", "cat"):
        (path / "bin" / name).symlink_to("busybox")
    (path / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    for name in ("group", "hosts", "resolv.conf", "localtime"):
        (path / "etc" / name).touch()
    return path


async def test_what_the_agents_own_tools_do_is_the_tasks_to_score(bed: Bed) -> None:
    """The SDK's loop runs the model's commands in the sandbox's workspace, where the task's files are."""
    llm = bed.llm(lambda prompt: "done" if "tool_response" in prompt else bash("cp oak.txt copy.txt; ls"))
    await bed.play(shipped("openai_sdk"), llm)
    assert "copy.txt" in llm.prompts[-1] and "oak.txt" in llm.prompts[-1]
