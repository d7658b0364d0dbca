"""``python -m prorl_hpc.bench.stub_agent --run-dir DIR --name NAME``: an inference agent with its vLLM engine, whose server
is stub_vllm: all that a request costs the agent, and nothing of what it costs vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

from prorl_hpc.inference.agent import InferenceAgent
from prorl_hpc.inference.protocol import Engine
from prorl_hpc.inference.vllm_engine import VllmEngine
from prorl_hpc.inference.vllm_process import VllmProcess
from prorl_hpc.inference.vllm_settings import VllmSettings
from prorl_hpc.messages.control import CoordinatorToInference, ServerRef
from prorl_hpc.messages.inference import WorkerToInference
from prorl_hpc.observe.process import Process, process_arguments, run_to_end, stop_event
from prorl_hpc.transport.agent_line import AgentLine, find_coordinator
from prorl_hpc.transport.channels import RouterDoor
from prorl_hpc.transport.keys import RunKeys


class StubSettings(VllmSettings):
    """Of a server that is no vLLM."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "prorl_hpc.bench.stub_vllm", str(self.socket)]


def stub_engine(process: Process) -> VllmEngine:
    config = process.config
    settings = StubSettings(
        engine=config.engine,
        model_path=Path(config.model.path),
        max_context_tokens=config.model.max_context_tokens,
        socket=process.runtime_dir / f"{process.name}-vllm.sock",
        cache_dir=process.runtime_dir / f"{process.name}-cache",
        gpus=[],
    )
    log = process.run.process_log(f"{process.name}-vllm")
    return VllmEngine(lambda: VllmProcess(settings, log), process.name, config.model.max_context_tokens, restarts=0)


async def serve(process: Process) -> None:
    engine = stub_engine(process)
    try:
        await engine.start(lambda detail: None)
        await _work(process, engine)
    finally:
        await engine.stop()


async def _work(process: Process, engine: Engine) -> None:
    keys, config = RunKeys.load(process.run.keys), process.config.rollout
    door: RouterDoor[WorkerToInference] = RouterDoor(
        WorkerToInference, keys, process.runtime_dir / f"{process.name}.sock"
    )
    line: AgentLine[CoordinatorToInference] = AgentLine(
        CoordinatorToInference,
        keys,
        process.name,
        lambda: find_coordinator(process),
        heartbeat_s=config.heartbeat_s,
        lost_after_s=config.lost_after_s,
    )
    try:
        server = ServerRef(process.name, process.node, door.ipc, "")
        agent = InferenceAgent(server, process.config, engine, door, line)
        await agent.run(stop_event(), lambda: process.ready({"zmq_ipc": door.ipc}))
    finally:
        line.close()
        door.close()


def main() -> int:
    arguments = process_arguments("bench.stub_agent")
    process = Process.start("inference", arguments.run_dir, arguments.name)
    return run_to_end(process, serve(process))


if __name__ == "__main__":
    sys.exit(main())
