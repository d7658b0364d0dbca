"""Images of sandboxes: one cache on storage that all nodes see, one pull per cluster, one copy per node.

``resolving`` answers what ``sandbox.image`` means; ``building`` brings images in, through spython; ``conversion`` does
so for a whole dataset; ``node_copy`` brings them near. ``prorl-hpc image`` is the command for people.
"""
