"""``python3 -I -S start.py SITE KIT SOCKET``: where our own modules are found, and then the server.

``-I -S`` keeps the image's and the agent's Python settings out; SITE is the directory that has ptyprocess.
"""

import os
import sys

site, kit, path = sys.argv[1:]
sys.path[:] = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))), *sys.path]
sys.path.append(site)

from prorl_hpc.sandbox.tools.server import main  # noqa: E402

main(kit, path)
