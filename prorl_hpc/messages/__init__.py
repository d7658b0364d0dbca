"""Every type that crosses a process border, and the error vocabulary. Imports nothing else of ours."""
