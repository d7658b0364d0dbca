"""Real agents, unmodified, in sandboxes without network: what they did is a token-exact trajectory with a reward."""

from __future__ import annotations

from hermes_chat import bash, number_seen, turns_of
from outside_bed import Bed, check_exact, conversations, shipped

from prorl_hpc.messages.trajectory import Trajectory


def tool_policy(prompt: str) -> str:
    """Looks into the file, then answers with what it saw."""
    number = number_seen(prompt)
    return f"It is there.\nanswer: {number}" if number else f"I look into it.\n{bash('cat oak.txt')}"


def mini_policy(prompt: str) -> str:
    """Looks, writes the answer down, submits."""
    steps = [
        "THOUGHT: look first.\n" + bash("cat oak.txt"),
        "THOUGHT: write it down.\n" + bash(f"printf {number_seen(prompt)} > answer.txt"),
        bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    return steps[turns_of(prompt)]


def smol_policy(prompt: str) -> str:
    """Writes code, as smolagents asks for."""
    shell = "subprocess.run({!r}, shell=True, capture_output=True, text=True).stdout"
    steps = [
        f"Thought: look first.\n<code>\nimport subprocess\nprint({shell.format('cat oak.txt')})\n</code>",
        f"Thought: write it down.\n<code>\nimport subprocess\n{shell.format(f'printf {number_seen(prompt)} > answer.txt')}\n"
        f"final_answer({number_seen(prompt)!r})\n</code>",
    ]
    return steps[turns_of(prompt)]


def trained_turns(trajectory: Trajectory) -> list[int]:
    """Trained segments of each conversation."""
    return [sum(segment.trained for segment in one.segments) for one in conversations(trajectory)]


async def test_mini_swe_agent(bed: Bed) -> None:
    llm = bed.llm(mini_policy)
    played = await bed.play(shipped("mini_swe_agent"), llm)
    assert played.reward == 1.0
    assert played.metrics["agent_exit_code"] == 0 and played.metrics["turns"] == 3
    check_exact(played.trajectory, llm)
    assert trained_turns(played.trajectory) == [3]


async def test_openai_chat_completions(bed: Bed) -> None:
    llm = bed.llm(tool_policy)
    played = await bed.play(shipped("openai_sdk"), llm)
    assert played.reward == 1.0
    check_exact(played.trajectory, llm)
    assert trained_turns(played.trajectory) == [2]


async def test_openai_responses(bed: Bed) -> None:
    llm = bed.llm(tool_policy)
    played = await bed.play(shipped("openai_responses"), llm)
    assert played.reward == 1.0
    check_exact(played.trajectory, llm)
    assert trained_turns(played.trajectory) == [2]


async def test_anthropic_messages(bed: Bed) -> None:
    llm = bed.llm(tool_policy)
    played = await bed.play(shipped("anthropic_sdk"), llm)
    assert played.reward == 1.0
    check_exact(played.trajectory, llm)
    assert trained_turns(played.trajectory) == [2]


async def test_smolagents(bed: Bed) -> None:
    llm = bed.llm(smol_policy)
    played = await bed.play(shipped("smolagents"), llm)
    assert played.reward == 1.0
    check_exact(played.trajectory, llm)
    # It appends "Calling tools: …" to what the model wrote, and sends that as the model's turn: not what was generated, so
    # the second call begins a conversation of its own.
    assert trained_turns(played.trajectory) == [1, 1]
