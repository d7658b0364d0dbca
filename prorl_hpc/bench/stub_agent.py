"""``python -m prorl_hpc.bench.stub_agent --run-dir DIR --name NAME``: an inference agent's requests and its vLLM engine,
with stub_vllm as the engine's server. It serves one bench and says nothing to the coordinator."""

from __future__ import annotations

import sys

from prorl_hpc.inference.request_server import RequestServer
from prorl_hpc.inference.vllm_engine import VllmEngine
from prorl_hpc.inference.vllm_process import VllmProcess
from prorl_hpc.inference.vllm_settings import VllmSettings
from prorl_hpc.messages.inference import WorkerToInference
from prorl_hpc.observe.process import Process, process_arguments, run_to_end, stop_event, unless_stopped
from prorl_hpc.transport.channels import RouterDoor
from prorl_hpc.transport.keys import RunKeys


class StubSettings(VllmSettings):
    """Of a server that is no vLLM."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "prorl_hpc.bench.stub_vllm", str(self.socket)]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PYTHONUNBUFFERED": "1"}


async def serve(process: Process) -> None:
    stop = stop_event()
    config, limit = process.config, process.config.model.max_context_tokens
    settings = StubSettings(
        engine=config.engine,
        model_path=process.run.path,
        max_context_tokens=limit,
        socket=process.runtime_dir / f"{process.name}-vllm.sock",
        cache_dir=process.runtime_dir / f"{process.name}-cache",
        gpus=[],
    )
    log = process.run.process_log(f"{process.name}-vllm")
    engine = VllmEngine(lambda: VllmProcess(settings, log), process.name, limit, restarts=0)
    door: RouterDoor[WorkerToInference] = RouterDoor(
        WorkerToInference, RunKeys.load(process.run.keys), process.runtime_dir / f"{process.name}.sock"
    )
    try:
        await engine.start(lambda detail: None)
        requests = RequestServer(
            engine, door, config.engine.max_parallel_requests, config.rollout.lost_after_s, process.name
        )
        process.ready({"zmq_ipc": door.ipc})
        await unless_stopped(requests.serve(), stop)
    finally:
        await engine.stop()
        door.close()


def main() -> int:
    arguments = process_arguments("bench.stub_agent")
    process = Process.start("inference", arguments.run_dir, arguments.name)
    return run_to_end(process, serve(process))


if __name__ == "__main__":
    sys.exit(main())
