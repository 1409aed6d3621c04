"""Breaking things on purpose: virtual nodes on one machine, faults at exact points, and what came of it.

Start with `chaos.cluster`, one of three backends that play nodes; the others are `chaos.user` and `chaos.ray`, and
`chaos.runner` is what they share. `chaos.faults` is the catalogue of what can be broken, `chaos.actions` how clusters
break it. `chaos.zygote` is the launcher's process, which imports once and forks trainers; `chaos.trainer` is what a
forked trainer sees. `chaos.network.wire` is a network between the nodes, and `chaos.network.clocks` has their wall
clocks, for scenarios that break these.
"""
