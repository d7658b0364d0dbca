"""The names of a run's files and directories in its run directory, which all nodes share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path


class RunPaths(ABC):
    """Paths alone: nothing is touched. ``path``: the run directory."""

    path: Path

    @property
    @abstractmethod
    def attempt(self) -> int:
        """The attempt that ``state`` and ``logs`` are of."""

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def attempt_dir(self) -> Path:
        return self.attempts / str(self.attempt)

    @property
    def attempt_config_file(self) -> Path:
        """The run's settings as they were when the attempt began: ``resume`` can change them."""
        return self.attempt_dir / "config.yaml"

    @property
    def ending_file(self) -> Path:
        """How the attempt ended, written by its launcher."""
        return self.attempt_dir / "ending.json"

    @property
    def placement_file(self) -> Path:
        """Which node of the plan is which host, in this attempt."""
        return self.attempt_dir / "placement.json"

    @property
    def run_id(self) -> str:
        return self.path.name

    # shared files
    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def state(self) -> Path:
        """ProcessState of each process, and the markers below; the attempt's own."""
        return self.attempt_dir / "state"

    @property
    def logs(self) -> Path:
        """The attempt's own."""
        return self.attempt_dir / "logs"

    @property
    def jobs(self) -> Path:
        """submitit's own files."""
        return self.path / "jobs"

    @property
    def lock_file(self) -> Path:
        """Locked by whoever submits the run, and says who that is (run_lock)."""
        return self.path / "lock"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def requests(self) -> Path:
        """What requests cost each LLM server (engine.record_requests)."""
        return self.path / "requests"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Where the trainer leaves weights for inference nodes that do not share its node."""
        return self.path / "weights"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report_file(self) -> Path:
        return self.path / "report.md"

    @property
    def reward_plot(self) -> Path:
        return self.path / "reward.png"

    @property
    def status_file(self) -> Path:
        return self.state / "status.json"

    @property
    def journal_file(self) -> Path:
        """The coordinator's SQLite database."""
        return self.path / "journal.sqlite"

    @property
    def epoch_file(self) -> Path:
        """The token of the run's epoch: which recorded rollouts count (rollout.epoch)."""
        return self.path / "epoch"

    @property
    def keepsakes_file(self) -> Path:
        """What a coordinator that is started again must know beside its journal."""
        return self.path / "keepsakes.json"

    @property
    def trainer_status_file(self) -> Path:
        return self.state / "trainer-status.json"

    @property
    def stop_marker(self) -> Path:
        """Exists when the attempt is to stop: slurm.endings.StopOrder; every node's supervisor looks at it."""
        return self.state / "STOP"

    @property
    def drained_marker(self) -> Path:
        """Written by the coordinator that was told to drain, when no rollout is under way any more."""
        return self.state / "DRAINED"

    @property
    def finished_marker(self) -> Path:
        """Written by the trainer when training is complete."""
        return self.state / "FINISHED"

    @property
    def failure_file(self) -> Path:
        """Written by the supervisor that sees the first process die: its name and last lines."""
        return self.state / "FAILED.json"

    def restarts_file(self, rank: int) -> Path:
        """Restarts of processes on the node of that rank, written by its supervisor."""
        return self.state / f"node-{rank}.restarts"

    def restart_files(self) -> list[Path]:
        return sorted(self.state.glob("node-*.restarts"))

    @property
    def api_token_file(self) -> Path:
        return self.keys / "api-token"

    @property
    def weight_secret_file(self) -> Path:
        """A secret of the run that its trainer and its inference processes prove to each other."""
        return self.keys / "client.secret"

    def process_state(self, name: str) -> Path:
        return self.state / f"{name}.json"

    def process_log(self, name: str) -> Path:
        return self.logs / f"{name}.log"
