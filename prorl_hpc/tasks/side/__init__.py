"""What runs beside a worker: other people's environments, each in a process, and if need be a Python, of its own.

``process`` is the worker's side. ``host`` runs in the other process, and with it one of the modules that answer calls; they
use the standard library alone, for that Python needs nothing of this package.
"""
