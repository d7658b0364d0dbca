"""prorl_hpc: train multi-turn LLM agents by reinforcement learning on a Slurm cluster."""

__version__ = "0.1.0"
