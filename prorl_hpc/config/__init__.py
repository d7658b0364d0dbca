"""Configuration schemas and the names of a run's files. Imports nothing else of ours."""
