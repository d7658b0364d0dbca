import verifiers as vf
from datasets import Dataset


def load_environment(size: int = 12, tools: bool = False):
    def rows(start):
        return Dataset.from_list(
            [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(start, start + size)]
        )

    def correct(completion, answer):
        return (
            1.0
            if answer in str(completion[-1]["content"] if isinstance(completion[-1], dict) else completion[-1].content)
            else 0.0
        )

    rubric = vf.Rubric(funcs=[correct])
    if tools:

        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        return vf.ToolEnv(dataset=rows(0), eval_dataset=rows(100), rubric=rubric, tools=[add], max_turns=4)
    return vf.SingleTurnEnv(dataset=rows(0), eval_dataset=rows(100), rubric=rubric, system_prompt="Add.")
