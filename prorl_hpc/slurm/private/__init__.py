"""A real Slurm cluster of one's own on this machine, up in about a second: nothing in /etc, no systemd.

``mini``: several slurmd on this host; needs no root; hides wrong use of /tmp and 127.0.0.1 across nodes.
``namespaced``: every node has its own network, mount, PID, IPC and UTS namespaces, private /tmp and /dev/shm,
and an address 10.77.0.x; needs root.
"""
