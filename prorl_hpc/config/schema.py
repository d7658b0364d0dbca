"""The configuration as typed dataclasses; each mirrors a group of ``conf/``.

Hydra composes YAML into these (unknown keys and wrong types are refused there); ``validate`` in
config.validation refuses what types cannot. Units are in the names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prorl_hpc.config.trainer_schema import TrainerConfig as TrainerConfig

TRAINED = "policy"
"""The name of the policy that ``model`` is, the one that is trained."""


@dataclass
class RunSettings:
    """Group-less top level ``run``: identity and place of a run."""

    name: str = "demo"
    """Names the run directory, with a random id: runs/<date>/<name>-<id>."""
    root: str = "runs"
    """Where run directories go; on a cluster, storage that all nodes share."""
    runtime_root: str = "/tmp"
    """Node-local directory for sockets and scratch; short, since socket paths end at 107 bytes. Variables such as
    $SLURM_TMPDIR are filled in on each node."""
    seed: int = 0
    start_timeout_s: float = 600.0
    """How long any process may take to become ready before the run is given up."""
    restarts: int = 3
    """How often a coordinator, worker or inference agent that died is started again on its node before the run ends."""
    drain_s: float = 30.0
    """How long `stop` and a coming time limit let rollouts end that are under way, while no new one is started."""
    stop_timeout_s: float = 25.0
    """How long processes have to stop by themselves before they are killed: the trainer saves a checkpoint meanwhile."""
    min_free_disk_gib: float = 4.0
    """Least free space for the run directory, checked before anything starts."""
    min_free_memory_gib: float = 0.0
    """Least available memory on this machine, checked before a local run starts."""


@dataclass
class ModelConfig:
    """Group ``model``: the policy. ``path`` is a Hugging Face directory; ``prepare`` names a recipe of
    ``prorl_hpc model prepare`` that makes it when it is missing (then ``path`` may be empty)."""

    name: str = "smollm2-135m"
    path: str = ""
    prepare: str = ""
    max_context_tokens: int = 1024
    thinking: str = "auto"
    """auto (as the chat template does by itself), on, off: for models whose template can do both."""
    tool_format: str = "auto"
    """How the model writes tool calls: auto (known from its template), hermes, qwen_xml, llama_json, pythonic, mistral,
    deepseek, harmony, bash_block, json."""


@dataclass
class PolicyConfig:
    """One more policy, served side by side with ``model`` (which is the policy named ``policy``, the one that is trained).
    Everything else of ``engine`` holds for its servers too."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name=""))
    """As group ``model``; without a name it is called as the policy."""
    servers_per_node: int = 1
    """LLM servers of this policy on each inference node, beside engine.servers_per_node of the trained one."""
    outside: list[str] = field(default_factory=list)
    """As engine.outside, for this policy; servers_per_node=0 then, unless it has servers of the run too."""
    reward: str = ""
    """module:function that turns the task's score into this policy's reward; empty: the task's own reward."""


@dataclass
class EngineConfig:
    """Group ``engine``: what serves the policy on an inference node."""

    kind: str = "auto"
    """auto (vllm where installed, else transformers), vllm, transformers, scripted."""
    servers_per_node: int = 1
    tensor_parallel: int = 1
    """GPUs (on CPU: processes) that one server is spread over, within a node unless nodes_per_server says otherwise."""
    pipeline_parallel: int = 1
    nodes_per_server: int = 1
    """Nodes that one server is spread over (tensor_parallel times pipeline_parallel GPUs in all); with more than one,
    servers_per_node is 1 and cluster.inference.nodes a multiple of it."""
    threads: int = 1
    """CPU threads per server (OMP_NUM_THREADS); GPUs ignore it."""
    dtype: str = "auto"
    """auto: float32 without a GPU, else bfloat16."""
    block_size: int = 32
    kv_cache_mib: int = 256
    """KV cache on CPU; on a GPU use gpu_memory_utilization."""
    gpu_memory_utilization: float = 0.85
    max_parallel_requests: int = 64
    start_timeout_s: float = 300.0
    restarts: int = 2
    """How often an inference agent starts its dead LLM server again; after that it ends itself, and is started again with
    a new server (run.restarts)."""
    extra_args: list[str] = field(default_factory=list)
    """More arguments for ``vllm serve``."""
    outside: list[str] = field(default_factory=list)
    """URLs of LLM servers outside the run (http://…/v1, unix:/path) that the coordinator registers at the start; the run
    ends if one does not answer. URL#MODEL says which of its models is meant. A bearer token for them is taken from
    PRORL_OUTSIDE_API_KEY."""
    outside_turn_s: float = 120.0
    """Seconds that a server outside the run may take for one turn; then the rollout goes on at another server. Keep it below
    rollout.run_s, and above what the longest turn takes when the server is busy."""
    env: dict[str, str] = field(default_factory=dict)
    script: dict[str, Any] = field(default_factory=dict)
    """Settings of kind=scripted: what it answers and how long it takes (docs/inference.md)."""
    record_requests: bool = False
    """Each server's agent writes what every request cost (tokens, seconds, how many ran beside it) into requests/ of the run
    directory: what `bench fit` makes a latency model of."""


@dataclass
class SandboxConfig:
    """Group ``sandbox``: where the agent's commands run."""

    kind: str = "auto"
    """auto (apptainer or singularity where it works, else local with a warning), apptainer, local."""
    image: str = "host"
    """A .sif file, a sandbox directory, a reference such as docker://python:3.12-slim that `prorl-hpc image pull` has
    brought into the cache, or ``host``: a skeleton that binds the node's own /usr read-only."""
    network: str = "none"
    """none or host; a task can ask for the other."""
    writable: str = "workspace"
    """workspace: the image is read-only; image: all of it can be written, into a directory of the sandbox's own."""
    copy_images: str = "auto"
    """One copy of an image per node: auto (where the image lies on a network file system), always, never."""
    unpack_images: bool = False
    """Unpack that copy into a directory: starts faster, and needs no FUSE on the node."""
    start_limit: int = 4
    """Sandboxes that start at the same time on one node."""
    start_timeout_s: float = 30.0
    start_retries: int = 2
    warm: int = 0
    """Sandboxes of the default kind that each worker keeps started, so that a start takes milliseconds."""
    output_limit_bytes: int = 16384
    strip_ansi: bool = True
    """Take terminal control sequences (colours and the like) out of output."""
    ipython: str = "inprocess"
    """inprocess (an InteractiveShell in a process of its own, the fastest) or kernel (a Jupyter kernel)."""
    shell: str = "own"
    """own (a shell on pipes and pseudo-terminals) or tmux (one that is typed into a tmux, whose screen is then looked at
    until the prompt is back, as ProRL-Agent's predecessor had it; to compare with): it needs tmux in the image."""
    tmux_poll_s: float = 0.5
    """How often sandbox.shell=tmux looks at the screen; OpenHands' BashSession does so every 0.5 s."""
    open_paths: bool = False
    """Let the file tools leave the workspace (they never leave the sandbox)."""
    max_processes: int = 256
    """Processes and threads of one sandbox."""
    max_memory_mib: int = 4096
    """Memory of one sandbox, files in memory included; 0: no limit."""
    max_disk_mib: int = 4096
    """Disk of one sandbox: workspace, /tmp, and what was written over the image; 0: no limit."""
    max_file_mib: int = 1024
    """Size of a single file; 0: no limit."""
    max_cpus: float = 0.0
    """CPUs of one sandbox, where the node has cgroups for it (`prorl-hpc doctor` says so); 0: no limit."""


@dataclass
class DataConfig:
    """A set of prompts: JSONL if ``path`` is given, else ``size`` rows of the task's own generator."""

    path: str = ""
    size: int = 256
    seed: int = 0


@dataclass
class TaskConfig:
    """Group ``task``: what the agent is asked to do, and on which prompts."""

    name: str = "file_trail"
    train: DataConfig = field(default_factory=DataConfig)
    heldout: DataConfig = field(default_factory=lambda: DataConfig(size=64, seed=1))
    max_turns: int = 4
    """Assistant turns per rollout."""
    max_turn_tokens: int = 48
    """Tokens per assistant turn; longer turns are cut and count as truncated."""
    max_rollout_tokens: int = 0
    """Tokens that the policy may generate in one rollout, all turns together; 0: no limit but the context's."""
    stop: list[str] = field(default_factory=list)
    """A turn that comes to contain one of these texts ends there, and with it the rollout."""
    max_repeats: int = 0
    """End a rollout that makes the same calls with the same results so often in a row, or whose turn repeats one piece of
    text to its end; 0: never."""
    system_prompt: str = ""
    """For tasks whose agent loop is the native one; empty: the task's own."""
    tools: list[str] = field(default_factory=list)
    """Tools that the native loop offers: bash, ipython, edit, think, finish, web_search; empty: the task's own."""
    web_search_url: str = ""
    """Where web_search asks, with {query} in it; answers JSON like SearXNG's (results: title, url, content)."""
    observation_limit_chars: int = 1000
    call_timeout_s: float = 20.0
    """One tool call of the agent; what runs longer is killed, and the agent is told."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of this task alone; unknown ones are refused by the task."""


@dataclass
class AgentConfig:
    """Group ``agent``: who talks to the model in RUN."""

    kind: str = "native"
    """native: the task's own loop; outside: a program in the sandbox that talks to the LLM gateway."""
    name: str = "native"
    image: str = ""
    """The image of an outside agent's sandbox; empty: the task's or sandbox.image."""
    command: list[str] = field(default_factory=list)
    """What an outside agent is started as, in the sandbox's workspace. {instruction}, {instruction_file}, {model},
    {openai_url} (…/v1), {anthropic_url} and {key} are filled in, here and in env and files."""
    env: dict[str, str] = field(default_factory=dict)
    """Beside OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, which are always set."""
    files: dict[str, str] = field(default_factory=dict)
    """Files that are written into the workspace before: name → content."""
    binds: list[str] = field(default_factory=list)
    """Directories of the node that the agent needs, read-only inside: /path or /path:/inside (a virtual environment)."""
    answer: str = "last_message"
    """Where its answer is: last_message (the last text that the model wrote to it), stdout, or file:NAME."""
    max_calls: int = 100
    """Calls to the model in one rollout; the next one is refused."""
    max_tokens: int = 0
    """Tokens of all conversations of one rollout at the LLM gateway, prompts and history that an agent rewrites included;
    then its calls are refused. 0: 16 times model.max_context_tokens."""


@dataclass
class RolloutConfig:
    """Group ``rollout``: pools and clocks of the rollout service."""

    workers_per_node: int = 1
    """Worker processes on each CPU node; every one has pools of its own, of the sizes below."""
    init_slots: int = 4
    """Rollouts of one worker whose sandbox starts and whose task is prepared at the same time."""
    ready_slots: int = 16
    """Prepared sandboxes of one worker that wait for a RUN slot; 0 (to compare with): INIT begins only when a RUN slot is
    free for it."""
    run_slots: int = 32
    """Rollouts of one worker that talk to LLM servers at the same time."""
    eval_slots: int = 4
    """Rollouts of one worker that are scored at the same time."""
    coupled: bool = False
    """One pool of run_slots that a rollout holds from INIT to the end of EVAL, instead of three (to compare with)."""
    policy_weights: dict[str, float] = field(default_factory=dict)
    """Shares of the policies among rollouts whose order names the policy ``any``; empty: equal shares of all."""
    balancing: str = "least_in_flight"
    """How LLM servers are chosen: least_in_flight, or (to compare with) round_robin, both once per rollout, or
    round_robin_per_request, anew for each turn."""
    abort_cancelled: bool = True
    """Stop at once what a cancelled rollout does. false (to compare with): one that is cancelled in RUN goes on to the end
    of RUN, on its worker and LLM server, in its slots, and what it comes to is thrown away."""
    when_server_lost: str = "move"
    """move: rollouts of a lost LLM server go on elsewhere with their tokens so far; retry: they start again."""
    init_s: float = 60.0
    """Seconds that INIT of one rollout may take; an order may bring budgets of its own."""
    run_s: float = 300.0
    """Seconds that RUN may take, on whichever LLM servers."""
    eval_s: float = 60.0
    """Seconds that EVAL may take."""
    total_s: float = 400.0
    """Seconds that all three may take together, queues not counted."""
    wall_s: float = 3600.0
    """Seconds that the whole life of a rollout may take, queues and retries counted."""
    retries: int = 2
    """Attempts beyond the first after sandbox, inference or infrastructure faults."""
    drain_s: float = 2.0
    """How long a worker that is told to stop lets its stages go on."""
    heartbeat_s: float = 2.0
    """Seconds between two signs of life of a worker or inference agent."""
    lost_after_s: float = 20.0
    """A node's agent unheard for so long is taken as lost."""
    http_tcp: bool = True
    """Serve the HTTP API on TCP too (token in the run directory); the Unix socket is always there."""
    http_port: int = 0
    """Its port; 0: one that is free, the same again for a coordinator that is started again."""
    keep_trajectories: bool = True
    """Write rollouts/*.parquet. Without it only the newest trajectories are kept, in the journal."""


@dataclass
class ComponentConfig:
    """One component of the heterogeneous job. Empty or zero: the site's default."""

    nodes: int = 1
    """0: no nodes, so none of this component's processes (inference: LLM servers are elsewhere)."""
    same_nodes_as: str = ""
    """Another component (rollout, inference or trainer) on whose nodes these processes run too; what else is set here
    but ``container`` and ``setup`` must be left out then."""
    cpus: int = 0
    """Per node."""
    memory_gib: float = 0.0
    """Per node."""
    gpus: int = 0
    """Per node."""
    gpu_type: str = ""
    """Such as a100: asks for that type of GPU."""
    partition: str = ""
    account: str = ""
    """In place of cluster.account."""
    qos: str = ""
    """In place of cluster.qos."""
    reservation: str = ""
    """In place of cluster.reservation."""
    constraint: str = ""
    nodelist: str = ""
    exclude: str = ""
    exclusive: bool = False
    cpu_bind: str = ""
    """srun's --cpu-bind for this component's node supervisors; their processes inherit it. Empty: Slurm's default, which is
    all CPUs of the node's step, unless the site has TaskPluginParam=Autobind: then ``none`` is needed."""
    container: str = ""
    """A .sif file or image directory in which this component's processes run; in place of cluster.container.image."""
    setup: list[str] = field(default_factory=list)
    """Shell lines on this component's nodes, after cluster.setup."""
    extra: dict[str, str] = field(default_factory=dict)
    """More sbatch options of this component, by long name: {"gres": "gpu:a100:4"}."""


@dataclass
class ContainerConfig:
    """A container for our own processes (LLM servers, trainer, agents), not for sandboxes."""

    image: str = ""
    """A .sif file or image directory that has this version of prorl_hpc and its packages; empty: the processes run on the
    node itself. The supervisor of each node always does."""
    python: str = "python3"
    """The Python in the image that has prorl_hpc."""
    args: list[str] = field(default_factory=list)
    """More arguments of `apptainer exec`, such as [--bind, /scratch]."""


@dataclass
class ClusterConfig:
    """Group ``cluster``: where the processes run. ``local`` ignores the components' sizes."""

    kind: str = "local"
    """local or slurm."""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    time_minutes: int = 60
    signal_lead_s: float = 120.0
    """Seconds before the allocation's end at which a run begins to leave off: rollouts under way end or are journalled,
    the trainer saves a checkpoint."""
    requeue: bool = True
    """Go on in the same job after a time limit, a preemption or a lost node, as the next attempt."""
    requeue_without_progress: int = 3
    """So many attempts in a row that finished no rollout end the run as failed."""
    no_kill: bool = True
    """Keep the job when a node is lost and enough others remain."""
    mail_user: str = ""
    mail_type: list[str] = field(default_factory=list)
    """Such as [END, FAIL, TIME_LIMIT]."""
    licenses: str = ""
    gpu_option: str = "gpus-per-node"
    """gpus-per-node or gres: by which sbatch option GPUs are asked for."""
    modules: list[str] = field(default_factory=list)
    """Environment modules that are loaded before our processes, as for `module load`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before our processes, after the modules: on the first node before the launcher, and on every node."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    extra: dict[str, str] = field(default_factory=dict)
    """More sbatch options for all components."""
    sbatch_lines: list[str] = field(default_factory=list)
    """Lines put into the script's head as they are, such as "#BB_LUA SBF"."""
    srun_args: list[str] = field(default_factory=list)
    interface: str = ""
    """Network interface (ib0) or subnet (10.1.0.0/16) whose address is published; empty: the address of the node's
    host name."""
    rollout: ComponentConfig = field(default_factory=ComponentConfig)
    inference: ComponentConfig = field(default_factory=ComponentConfig)
    trainer: ComponentConfig = field(default_factory=ComponentConfig)


@dataclass
class ProrlConfig:
    """The whole configuration of a run."""

    run: RunSettings = field(default_factory=RunSettings)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    policies: dict[str, PolicyConfig] = field(default_factory=dict)
    """More policies by name, served beside ``model``."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
