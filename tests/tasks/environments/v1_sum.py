import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return 1.0 if self.data.answer in trace.last_reply else 0.0


class SumConfig(vf.TasksetConfig):
    size: int = 12


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(self.config.size):
            yield SumTask(SumData(prompt=f"What is {i} + 1?", answer=str(i + 1)), self.config.task)


__all__ = ["SumTaskset"]
