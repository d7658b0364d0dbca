"""The LLM gateway of a worker: chat APIs for outside agents, and token-exact conversations behind them."""
