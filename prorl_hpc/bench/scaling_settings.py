"""The words of ``bench scaling`` that are not Hydra's; apart, for the tab key needs them at once."""

from __future__ import annotations

SETTINGS = {
    "nodes": "1,2,4,8: a point for each, with so many CPU nodes and as many inference nodes",
    "workload": "mixed: what is rolled out, a choice of the group bench",
    "recorded": "a run directory whose stage times workload=recorded replays",
    "ablate": "all, or some of the ablations, side by side; without nodes= they alone are measured",
    "rollouts": "rollouts per node; else at least 12 for each of a node's RUN slots, all rows equally often",
    "minutes": "30: the time limit of each point",
    "at_once": "1: points under way at the same time; on a cluster all of them may be, on one machine they disturb each other",
    "out": "the folder of the series; with the folder of one that was interrupted, that one goes on",
}
FLAGS = ("--local", "--private", "--simulate", "--again", "--json", "--help")
WHOLE_TURNS = "engine.script.reply_min_tokens=1000000"
"""A scripted turn is as long as the workload's row says, and not anything up to that."""
